"""The decoding loop of `generate` of an accelerated model: greedy search and sampling.

transformers' loop spends two milliseconds of Python on every token: it prepares the model's inputs, makes longer masks
and positions, and calls each processor on the whole vocabulary. Here the text is one tensor that is filled, and the
step of decoding is called directly. Processors, stopping criteria and streamers of the user are called for every
token, as transformers calls them. A request that this loop does not know runs in transformers' own loop.

With prompt look-up (`prompt_lookup_num_tokens`), a draft (`assistant_model`, or that of `accelerate`), or both, a step
verifies several guessed tokens of one sequence where it gains time. Its logits are those of steps of one token, bit by
bit, and a guess is kept only if the same token is then chosen from them, with the same random numbers: the text is the
one that is written without guesses. With a `rollback` of `accelerate`, guesses of its draft also stay where the model
loses little on them, so that its texts are approximate.

On a GPU, the host reads a token only after it has launched the step of the next one (`kernels.step.writing.text`),
unless the caller could tell the difference: by a cache, processors, criteria or hooks of its own.
"""

import copy
import functools
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    GenerationMode,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from kernels.step.native import MOST_IN_SEQUENCE
from kernels.step.recognition.recognise import changes_at
from kernels.step.writing.drafts import check_positions, check_vocabulary
from kernels.step.writing.guesses import Draft, DraftPace, Guesser, LookupOrDraft, PromptLookup
from kernels.step.writing.sampling import SamplingChoice, choice_of
from kernels.step.writing.text import Text

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}  # the model's other inputs


def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`generate` of transformers with `decode` as `custom_generate`, if this loop knows the request.

    The arguments and results are those of transformers. A step verifies at most `MOST_IN_SEQUENCE` - 1 guesses, so that
    a larger `prompt_lookup_num_tokens` gives a warning.

    Raises:
        ValueError: `prompt_lookup_num_tokens` or `max_matching_ngram_size` is below 1; a draft has another vocabulary,
            or fewer positions than the text may get.
    """
    own = type(model).generate
    if len(args) > 2 or kwargs.get("custom_generate") is not None:
        return own(model, *args, **kwargs)
    if len(args) == 2:
        kwargs["generation_config"], args = args[1], args[:1]
    config = kwargs.get("generation_config")
    config, _ = model._prepare_generation_config(config, **{k: v for k, v in kwargs.items() if k in _settings()})
    looks_up, config.prompt_lookup_num_tokens = config.prompt_lookup_num_tokens, None
    if looks_up is not None:
        _check_look_up(looks_up, config.max_matching_ngram_size)
    if config.get_generation_mode(None) not in MODES or config.is_assistant:
        return own(model, *args, **kwargs)
    asked = looks_up is not None or kwargs.get("assistant_model") is not None
    guesser = _guesser(model, looks_up, args, kwargs, config)
    if asked and guesser is None:
        return own(model, *args, **kwargs)
    if asked:
        kwargs = _without_guesses(model, kwargs)
    if config.stop_strings is not None:
        if kwargs.get("tokenizer") is None or model.generation_config.stop_strings is not None:
            return own(model, *args, **kwargs)
        kwargs = _stop_strings_as_criterion(config.stop_strings, kwargs)
    own_cache = kwargs.get("past_key_values") is None
    loop = functools.partial(decode, streamer=kwargs.get("streamer"), guesser=guesser, drops_cache=own_cache)
    return own(model, *args, **kwargs, custom_generate=loop)


def _check_look_up(num_tokens: int, ngram_size: int | None) -> None:
    if num_tokens < 1:
        raise ValueError(f"`prompt_lookup_num_tokens` (={num_tokens!r}) must be 1 or more, or None for no look-up")
    if ngram_size is not None and ngram_size < 1:
        raise ValueError(f"`max_matching_ngram_size` (={ngram_size!r}) must be 1 or more, or None for the default")


@functools.cache
def _settings() -> set[str]:
    """Names of the settings of a generation, which `generate` takes as keyword arguments."""
    return set(GenerationConfig().to_dict())


def _guesser(
    model: nn.Module, looks_up: int | None, args: tuple[Any, ...], kwargs: dict[str, Any], config: GenerationConfig
) -> Guesser | None:
    """What guesses tokens for this request; None: nothing that steps of this model can verify.

    Raises:
        ValueError: `assistant_model` has another vocabulary.
    """
    draft = kwargs.get("assistant_model")
    if draft is None:
        draft = getattr(model.acceleration, "draft", None)
    given = args[:1] + (kwargs.get("inputs"), kwargs.get("input_ids"))
    ids = next((one for one in given if one is not None), None)
    if (draft is None and looks_up is None) or config.num_return_sequences > 1 or (ids is not None and len(ids) > 1):
        return None
    if kwargs.get("assistant_tokenizer") is not None or not _verifies(model):
        return None
    most = MOST_IN_SEQUENCE - 1
    if (looks_up or 0) > most:
        warnings.warn(
            f"`prompt_lookup_num_tokens` (={looks_up}) is more than the {most} guesses that a step verifies: at most "
            f"{most} are looked up at a time",
            stacklevel=4,
        )
    settings = min(looks_up or 0, most), config.max_matching_ngram_size
    acceleration = model.acceleration
    if draft is not None:
        check_vocabulary(model, draft, "assistant_model")
    if draft is None or draft is model or not _verifies(draft):
        return None if looks_up is None or kwargs.get("assistant_model") is not None else PromptLookup(*settings)
    rollback = acceleration.rollback if draft is acceleration.draft else 0.0
    pace = acceleration.paces.setdefault((id(draft), rollback, looks_up is not None), DraftPace())
    guesser = Draft(draft, most, pace, rollback)
    return guesser if looks_up is None else LookupOrDraft(PromptLookup(*settings, pace), guesser, pace)


def _verifies(model: nn.Module) -> bool:
    """Can steps of this model verify guessed tokens?"""
    verifies = getattr(getattr(model, "acceleration", None), "verifies", None)
    return verifies is not None and verifies()


def _without_guesses(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` without look-up and draft, for which transformers has another loop."""
    left_out = "prompt_lookup_num_tokens", "assistant_model"
    kwargs = {name: value for name, value in kwargs.items() if name not in left_out}
    if (config := kwargs.get("generation_config")) is not None:
        kwargs["generation_config"] = config = copy.deepcopy(config)
        config.prompt_lookup_num_tokens = None
    if model.generation_config.prompt_lookup_num_tokens is not None:
        kwargs["prompt_lookup_num_tokens"] = None
    return kwargs


def _stop_strings_as_criterion(stop_strings: str | list[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` with a criterion in place of the stop strings: transformers does not hand the
    tokenizer on when there is a `custom_generate`, and could not make this criterion itself."""
    criterion = StopStringCriteria(kwargs["tokenizer"], stop_strings)
    criteria = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
    kwargs = {name: value for name, value in kwargs.items() if name not in ("tokenizer", "stop_strings")}
    if (config := kwargs.get("generation_config")) is not None:
        kwargs["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    return kwargs | {"stopping_criteria": criteria}


def decode(
    model: nn.Module,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    guesser: Guesser | None = None,
    drops_cache: bool = False,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Read a prompt and write behind it; takes the place of transformers' `GenerationMixin._sample`, which still writes
    some texts, without guesses: those that may grow beyond the length at which a model's rotary frequencies change.

    Args:
        input_ids: int64 [batch, tokens], the prompt. model_kwargs: the model's other inputs, such as its cache.
        guesser: guesses tokens that steps verify, where steps can; None: every token takes a step.
        drops_cache: the cache is not the caller's, so that it is dropped unless it is returned.

    Returns:
        int64 [batch, tokens + new]: greedily, the tokens that transformers' loop gives with the same model. Or, as
        configured, an object with these sequences, scores, logits and the cache.
    """
    config = generation_config
    more = config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states)
    fixed = getattr(model_kwargs.get("past_key_values"), "is_compileable", False)  # wants masks of its own
    change = changes_at(model)  # transformers reads the text again there
    fixed = fixed or (change is not None and input_ids.shape[1] <= change < config.max_length)
    if synced_gpus or more or fixed or not model_kwargs.get("use_cache") or not model_kwargs.keys() <= KNOWN:
        return type(model)._sample(
            model, input_ids, logits_processor, stopping_criteria, config,
            synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
        )  # fmt: skip
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None and mask.dim() == 2 and bool((mask == 1).all()):
        mask = None  # as newer versions of transformers do
    guesser = guesser if len(input_ids) == 1 else None  # whatever the arguments of `generate` looked like
    if guesser is not None and guesser.model is not None:
        check_positions(model, guesser.model, input_ids.shape[1], config.max_length)
    outputs = model._prefill(input_ids, config, model_kwargs, is_first_iteration=True)
    cache, logits = outputs.past_key_values, outputs.logits[:, -1].float()
    del outputs  # the logits of a whole prompt may be large
    returns = config.return_dict_in_generate
    kept = bool(returns and config.output_scores), bool(returns and config.output_logits)
    choice = choice_of(logits_processor, config.do_sample, *kept)
    text = Text(input_ids, stopping_criteria, config._pad_token_tensor, streamer)
    several = () if guesser is None else (MOST_IN_SEQUENCE,)
    steps = _steps(model, cache, len(input_ids), mask, positions, *several) or Calls(model, cache, mask, positions)
    if input_ids.is_cuda and drops_cache and not returns and choice.pure and not isinstance(steps, Calls):
        text.read_late()
    try:
        tokens = text.append(choice(text.ids, logits), choice)
        if guesser is not None and hasattr(steps, "cut"):
            model.acceleration.guessed += _write_by_guesses(text, tokens, steps, choice, guesser)
        while text.continues:
            largest = steps(tokens[:, None])
            chosen = largest[:, 0] if choice.largest and largest is not None else choice(text.ids, steps.logits)
            tokens = text.append(chosen, choice)
        text.finish()
    finally:
        steps.finish()
    if streamer is not None:
        streamer.end()
    if not returns:
        return text.ids
    scores, raw = choice.scores if kept[0] else None, choice.logits if kept[1] else None
    return GenerateDecoderOnlyOutput(sequences=text.ids, scores=scores, logits=raw, past_key_values=cache)


def _write_by_guesses(text: Text, tokens: Tensor, steps: Any, choice: SamplingChoice, guesser: Guesser) -> int:
    """Write the text of one sequence to its end; tokens [1] is its last one. A step reads it and guesses behind it.
    Returns the number of guesses."""
    known, count = text.ids[0].tolist(), 0
    while text.continues:
        guessed = guesser.guess(known, max(text.left - 1, 0), choice)
        began = time.perf_counter()
        largest = steps(torch.tensor([[known[-1], *guessed]]))
        seconds, accepted = time.perf_counter() - began, 0
        own = choice.largest and largest is not None
        logits = (
            None if own and not guesser.rollback else steps.logits
        )  # once for all rows: a soft cap is computed here
        try:
            for row in range(len(guessed) + 1):
                chosen = largest[row] if own else choice(text.ids, logits[row : row + 1])
                if guesser.rollback and row < len(guessed) and int(chosen) != guessed[row]:
                    loss = choice.loss(text.ids, logits[row : row + 1], guessed[row])
                    chosen = torch.full_like(chosen, guessed[row]) if loss <= guesser.rollback else chosen
                known.append(int(text.append(chosen, choice)))
                if not text.continues or row == len(guessed) or known[-1] != guessed[row]:
                    break
                accepted += 1
        finally:
            steps.cut(len(guessed) - accepted)
        guesser.note(accepted, seconds)
        count += len(guessed)
    return count


def _steps(
    model: nn.Module, cache: Any, batch: int, mask: Tensor | None, positions: Tensor | None, *several: int
) -> Any:
    """Fast steps behind a prompt with this mask and these positions, [batch, tokens]; None: there are none.

    several: the most tokens of one sequence that a step will read, if that is not one.
    """
    if mask is None and (positions is None or bool((positions[:, -1] == cache.get_seq_length() - 1).all())):
        return model.acceleration.steps(cache, batch, *several)
    return None if positions is None else model.acceleration.padded_steps(cache, mask, positions)


class Calls:
    """Steps of decoding by calls of the model, for padded sequences and caches that compute the attention."""

    def __init__(self, model: nn.Module, cache: Any, mask: Tensor | None, positions: Tensor | None) -> None:
        """mask, positions: those of the prompt, [batch, tokens]."""
        self._model, self._cache, self._mask, self._positions = model, cache, mask, positions
        self.logits = torch.empty(0)  # float32 [batch, vocabulary], of the last step

    def advance(self, count: int) -> None:
        """Note that each sequence gets further tokens, which are no padding."""
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), count)], 1)
        if self._positions is not None:
            self._positions = self._positions[:, -1:] + count

    def __call__(self, tokens: Tensor) -> None:
        """Read one more token per sequence, int64 [batch, 1]."""
        self.advance(1)
        outputs = self._model(
            input_ids=tokens, attention_mask=self._mask, position_ids=self._positions, past_key_values=self._cache,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        self.logits = outputs.logits[:, -1].float()

    def finish(self) -> None:
        """The cache counts its positions itself."""
