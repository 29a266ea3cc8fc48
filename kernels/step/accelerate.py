"""Make a transformers model generate at the speed that this workbench measures.

`model.generate` spends most of a token's time between the products: Python, a dispatcher and an allocation for every
small operation. An accelerated model reads prompts through `DecoderForward` and takes its steps in one call of C++
(`DecodeStep`), from the caches that `generate` makes by itself.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kernels import native
from kernels.huge_pages import in_huge_pages
from kernels.linear import fast_linear
from kernels.step.assemble import NativeStep, native_step, step_of
from kernels.step.cache import AttendingCache, LayerRoom, LentRooms, RoomyLayer, roomy, static_cache
from kernels.step.forward import DecoderForward, NativePrompt, native_prompt
from kernels.step.gpu.accelerate import GraphAcceleration
from kernels.step.in_parts import StepInParts
from kernels.step.native import MOST_IN_SEQUENCE, MOST_TOKENS
from kernels.step.outputs import check_outputs
from kernels.step.recognition.decoder import Decoder
from kernels.step.recognition.parts import NotNative
from kernels.step.recognition.recognise import ACCELERATION, recognise, state_of
from kernels.step.writing.drafts import check_vocabulary
from kernels.step.writing.generate import generate
from kernels.step.writing.guesses import DraftPace
from kernels.support.deploy import cast

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WHY_NOT = "why_not_accelerated"  # attribute of a model that could not be accelerated
LAID_OUT = 512  # length of the prompts for which dense weights are laid out, in tokens
SPARE = 2.0  # free memory needed to lay out the dense weights, as a multiple of their size
MORE_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
TRIED = 16  # tokens of the prompt whose logits are compared with the model's


def accelerate(
    model: nn.Module,
    dtype: torch.dtype | str | None = torch.bfloat16,
    draft: nn.Module | None = None,
    rollback: float = 0.0,
    lay_out: bool = True,
) -> nn.Module:
    """Make `model.generate` fast, compressed or not, in place; on a CPU also calls of the model with a cache.

    On a GPU, each step of decoding is replayed as one CUDA graph (`kernels.step.gpu`), captured when a batch size is
    first met: of fused operations for the models below, of the model's own code for others. Fused operations also read
    compressed caches of 8 and 4 bits, or after an eviction, with padding too. Prompts are read by the model's own code,
    which also takes the steps of padded prompts in generate's default cache, and of other caches.

    The logits are those of the model up to rounding: sums between the products are kept in float32. The model's own
    code runs in all cases that the fast path does not support: gradients, `inputs_embeds`, requested attentions or
    hidden states, masks other than padding on the left, and caches other than generate's default and compressed ones.
    Up to 8 sequences decode in one call of C++, or in one call per attention if some have padding or the cache is
    compressed. More sequences, and formats without such loops, run op by op. With a compressed cache, the model's own
    code reads prompts with padding, and also decodes after them where layers have windows.

    Args:
        model: a causal decoder of the Llama family (Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3 and their like), on a
            CPU also with a mixture of experts in the place of the MLP. For others there is a warning with the reason,
            which `model.why_not_accelerated` keeps, and the model's own code runs. If the model is compressed or cast
            afterwards, the next prompt takes this into account. Torch keeps no count of writes through `.data` and in
            inference mode, so that these do not show: call `model.acceleration.remove()`, which undoes the change,
            before them.
        dtype: the dtype to cast the model to: torch.bfloat16, torch.float16 or their names; None: no cast.
        draft: a smaller model with the same tokenizer, such as the compressed model, which guesses tokens of single
            texts that this model verifies, several in a step, on a CPU: the texts stay the same, and take less time
            where the draft guesses well. Two models in memory show how many tokens each has, and no more; tokens are
            compared if both come from folders with a tokenizer.json. The draft is accelerated, too, and replaces an
            earlier one; None: an earlier one stays. If it cannot be used with this model, there is a warning with the
            reason.
        rollback: if above 0, texts are no longer those of the model: a guess of the draft stays as long as the model
            itself loses at most so many nats on it (-log p), also where the model would choose another token. It counts
            for the draft that is given here or was given before, and for no other guesses; a call without it sets 0.
        lay_out: lay 16-bit weights out a second time for prompts, if there is much free memory; False: they are read as
            they are, more slowly. It counts for the model and a draft, if they are not accelerated yet.

    Returns:
        the model

    Raises:
        ValueError: another dtype, `model` is not a model of transformers, `rollback` is no loss, or `draft` has another
            tokenizer, is the model itself, or cannot guess on this device.
    """
    dtype = _checked(model, dtype)
    if not 0 <= rollback < float("inf"):
        raise ValueError(f"`rollback` (={rollback!r}) must be a loss in nats per token above 0, or 0 for exact texts")
    if draft is not None:
        _check_draft(model, draft)
    earlier = getattr(getattr(model, ACCELERATION, None), "draft", None)
    if why_not := _accelerated(model, dtype, lay_out):
        warnings.warn(f"the model is not accelerated: {why_not}", stacklevel=2)
    draft = earlier if draft is None else draft
    if draft is not None and (why_not := _set_draft(model, draft, lay_out)):
        warnings.warn(f"the draft is not used: {why_not}", stacklevel=2)
    if (acceleration := getattr(model, ACCELERATION, None)) is not None:
        acceleration.rollback = rollback
    return model


def _set_draft(model: nn.Module, draft: nn.Module, lay_out: bool) -> str:
    """Accelerate the draft of an accelerated model, and return why it is not used; "": it is used."""
    why_not = _accelerated(draft, model.dtype if model.dtype in DTYPES.values() else None, lay_out)
    if (acceleration := getattr(model, ACCELERATION, None)) is not None:
        acceleration.draft = draft
    refused = f"it is not accelerated: {why_not}" if why_not else ""
    return why_not_verifying(model, "model") or refused or why_not_verifying(draft, "draft")


def _check_draft(model: nn.Module, draft: nn.Module) -> None:
    if not isinstance(draft, PreTrainedModel):
        raise ValueError(f"`draft` ({type(draft).__name__}) must be a model of transformers")
    check_vocabulary(model, draft, "draft")
    if draft is model or "cuda" in (model.device.type, draft.device.type):
        why = "is the model itself" if draft is model else f"is on {draft.device}, and the model on {model.device}"
        raise ValueError(f"`draft` {why}; it must be another model, and both on a CPU")


def why_not_verifying(model: nn.Module, which: str) -> str:
    """Why no steps of an accelerated model verify guesses; "" if they do. which: "model" or "draft"."""
    acceleration = getattr(model, ACCELERATION, None)
    if not hasattr(acceleration, "verifies"):
        reason = getattr(model, WHY_NOT, "")
        return f"the {which} is not accelerated on a CPU{reason and f': {reason}'}"
    if acceleration.verifies():
        return ""
    if why_not := acceleration.why_not or acceleration.why_not_in_one_call:
        return f"the {which} has no steps in one call of C++: {why_not}"
    return f"several tokens in one step of the {which} do not get the logits of steps of one token"


def _checked(model: nn.Module, dtype: torch.dtype | str | None) -> torch.dtype | None:
    dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype not in (None, *DTYPES.values()):
        raise ValueError(f"`dtype` (={dtype!r}) must be torch.bfloat16, torch.float16 or None")
    if not isinstance(model, PreTrainedModel):
        within = "; take its `.model`" if isinstance(getattr(model, "model", None), PreTrainedModel) else ""
        raise ValueError(f"`model` ({type(model).__name__}) must be a model of transformers{within}")
    return dtype


def _accelerated(model: nn.Module, dtype: torch.dtype | None, lay_out: bool = True) -> str:
    """Accelerate a model in place, and return why not; "": it is accelerated."""
    if (earlier := getattr(model, ACCELERATION, None)) is not None:
        if dtype in (None, model.dtype):
            return ""
        earlier.remove()
    if dtype is not None and model.dtype != dtype:
        cast(model, dtype)
    if model.device.type == "cuda":
        devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        if len(devices) > 1:
            return f"it is on {len(devices)} devices"
        GraphAcceleration(model).take_over()
        return ""
    acceleration = Acceleration(model, lay_out=lay_out)
    vars(model).pop(WHY_NOT, None)
    try:
        acceleration.assemble()
    except NotNative as error:
        setattr(model, WHY_NOT, str(error))
        return str(error)
    acceleration.take_over()
    return ""


def accelerate_by(model: nn.Module, prompt: NativePrompt, why_not_in_one_call: str = "") -> None:
    """Accelerate a model, in place, with a pass over prompts that has been compared with the model's already.

    Args:
        why_not_in_one_call: why there is no step of decoding in one call of C++; "": there is one, which has been
            compared, too.
    """
    acceleration = Acceleration(model, why_not_in_one_call)
    acceleration._reader, acceleration._state = prompt.forward, state_of(model)
    acceleration.take_over()


@dataclass
class _Bound:
    """The decoding step for one cache: the rooms of its layers, the program that reads and writes them, and the number
    of positions in use according to the rooms."""

    rooms: list[LayerRoom]
    step: NativeStep
    held: int = -1

    def run(self, ids: Tensor, slot: int) -> Tensor:
        """Read the tokens ids [batch, 1] at position `slot`; returns the tokens with the largest logits [batch, 1]. Of
        one sequence several can be read, ids [1, n]; returns the tokens [n, 1] behind each."""
        for room in self.rooms if self.held != slot else ():
            room.length.fill_(slot)
        self.held = -1  # a step that is interrupted leaves the rooms' lengths unknown
        largest = self.step.at(ids if ids.shape[1] == 1 else ids.t().contiguous(), slot)
        self.held = slot + ids.shape[1]
        return largest


@dataclass(repr=False)
class Acceleration:
    """How a model is run; created by `accelerate`.

    Attributes:
        why_not_in_one_call: why single tokens run op by op; "" if they run in one call.
        why_not: why the model's own code has run since the model was changed; "" if the fast path runs.
        draft: guesses tokens of texts where `generate` is given no other; or None.
        rollback: loss of the model up to which guesses of a draft stay; 0: only those that it chooses itself.
        guessed: number of tokens that were guessed so far in texts of this model, accepted or not.
        paces: of each draft, by its id and `rollback`, and whether tokens are looked up, too, how far it guesses ahead.
        lay_out: whether 16-bit weights are laid out for prompts, as in `accelerate`.
    """

    model: nn.Module
    why_not_in_one_call: str = ""
    why_not: str = ""
    draft: nn.Module | None = None
    rollback: float = 0.0
    guessed: int = 0
    paces: dict[tuple[int, float, bool], DraftPace] = field(default_factory=dict)
    lay_out: bool = True
    _state: tuple[Any, ...] | None = None  # the model's `state_of` when the reader was made
    _reader: DecoderForward | None = None
    _bound: dict[int, _Bound] = field(default_factory=dict)
    _in_parts: dict[int, StepInParts] = field(default_factory=dict)  # by number of sequences
    _verifies: bool | None = None  # whether several tokens in one step get the logits of steps of one; None: not known

    def __repr__(self) -> str:
        if self.why_not:
            return f"the model's own code: {self.why_not}"
        how = f"op by op: {self.why_not_in_one_call}" if self.why_not_in_one_call else "in one call of C++"
        return f"prompts by {native.isa(self.model.dtype, True)}, steps {how}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Acceleration":
        model = memo.get(id(self.model), self.model)
        return Acceleration(
            model, self.why_not_in_one_call, draft=self.draft, rollback=self.rollback, lay_out=self.lay_out
        )  # assembled when first used

    def take_over(self) -> None:
        """Take the place of the model's `forward` and `generate`."""
        setattr(self.model, ACCELERATION, self)
        self.model.forward, self.model.generate = self.forward, self.generate

    def remove(self) -> None:
        """Give the model its own `forward` and `generate` back."""
        for name in ("forward", "generate", ACCELERATION):
            self.model.__dict__.pop(name, None)
        self._forget()

    def _forget(self) -> None:
        self._reader, self._bound, self._in_parts, self._state, self.why_not = None, {}, {}, None, ""
        self._verifies = None

    @torch.no_grad()
    def assemble(self) -> None:
        """Recognise the decoder, and compare its layers one by one with the model's, and its logits for a prompt and a
        few steps.

        Raises:
            NotNative: the model is of another kind, or something differs.
        """
        model, self.why_not_in_one_call = self.model, ""
        decoder = recognise(model)  # before any pass, because other kinds of models may not know static caches
        ids = (torch.arange(TRIED) * 7919 % model.get_input_embeddings().num_embeddings)[None]
        cache = static_cache(model, 64)
        cache.is_trial = True  # caches that are attached to the model need not warn of it

        def after_prompt() -> None:
            cache.reset()
            with fast_linear():
                model(ids, past_key_values=cache, use_cache=True)

        after_prompt()  # makes the cache's tensors
        native_prompt(model, cache, ids, laid_out=False, decoder=decoder)
        check_outputs(model, decoder)
        try:
            native_step(model, cache, ids[:, -1:], torch.tensor([[TRIED]]), after_prompt, decoder)
        except NotNative as error:
            self.why_not_in_one_call = str(error)
        self._reader = self._made(decoder)
        self._state = state_of(model)

    def _ready(self) -> bool:
        """Assemble again if the model has been changed; False if the model's own code must run from then on."""
        now = state_of(self.model)
        if self._state == now:
            return not self.why_not
        self._forget()
        try:
            self.assemble()
        except NotNative as error:
            self._state, self.why_not = now, str(error)
            warnings.warn(
                f"the model was changed after `accelerate`, so its own code runs now: {error}; "
                "`model.acceleration.remove()` undoes what `accelerate` did",
                stacklevel=2,
            )
        return not self.why_not

    def _made(self, decoder: Decoder) -> DecoderForward:
        dense = [p for p in self.model.parameters() if p.dim() == 2]
        free = psutil.virtual_memory().available
        room = self.lay_out and free > SPARE * sum(p.numel() * p.element_size() for p in dense)
        in_huge_pages([*self.model.parameters(), *self.model.buffers()])
        return DecoderForward(decoder, LAID_OUT if room else 0)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Takes the place of the model's forward; the same arguments and outputs."""
        cache = past_key_values
        plain = (
            input_ids is not None
            and input_ids.dim() == 2
            and inputs_embeds is None
            and labels is None
            and isinstance(logits_to_keep, int)
            and not torch.is_grad_enabled()
            and (type(cache) is DynamicCache or hasattr(cache, "attend_new"))
            and kwargs.get("return_dict") is not False
            and not any(kwargs.get(name, getattr(self.model.config, name, False)) for name in MORE_OUTPUTS)
            and (self._ready() if cache.get_seq_length() == 0 else self._reader is not None)
        )
        if plain and (seen := _first_seen(attention_mask, cache.get_seq_length() + input_ids.shape[1])) is not None:
            logits = self._logits(input_ids, cache, position_ids, None if not seen.any() else seen, logits_to_keep)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        return type(self.model).forward(
            self.model, input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, labels, use_cache,
            logits_to_keep=logits_to_keep, **kwargs,
        )  # fmt: skip

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the model's `generate`; the same arguments and outputs, with a fast decoding loop."""
        return generate(self.model, *args, **kwargs)

    @torch.no_grad()
    def verifies(self) -> bool:
        """Can steps of one sequence verify guessed tokens? Several tokens in one step must get the logits of steps of
        one token each, bit by bit; this is tried once with this model on this machine."""
        if not self._ready() or self.why_not_in_one_call:
            return False
        if self._verifies is None:
            decoder, ids = self._reader.decoder, torch.arange(MOST_IN_SEQUENCE)[None] * 7919
            ids = ids % self.model.get_input_embeddings().num_embeddings
            rooms = roomy(decoder, DynamicCache(), 1, MOST_IN_SEQUENCE)
            bound = _Bound(rooms, step_of(decoder, rooms, MOST_IN_SEQUENCE))
            bound.run(ids, 0)
            at_once, self._verifies = bound.step.logits.clone(), True
            for i in range(MOST_IN_SEQUENCE):
                bound.run(ids[:, [i]], i)
                self._verifies = self._verifies and torch.equal(bound.step.logits[0], at_once[i])
        return self._verifies

    def steps(self, cache: Any, batch: int, tokens: int = 1) -> "StepsInOneCall | None":
        """Steps behind a prompt that the model has read into a cache without padding; None: call the model instead.

        tokens: the most tokens of one sequence that a step will read.
        """
        hooked = self.model._forward_hooks or self.model._forward_pre_hooks
        if type(cache) is not DynamicCache or self._reader is None or self.why_not_in_one_call or hooked:
            return None
        if batch > MOST_TOKENS or roomy(self._reader.decoder, cache, batch, 1) is None:
            return None
        return StepsInOneCall(self, cache, batch, tokens)

    def padded_steps(self, cache: Any, mask: Tensor | None, positions: Tensor) -> None:
        """Steps behind sequences that begin at different positions: there are none but calls of the model."""

    def _logits(
        self,
        ids: Tensor,
        cache: DynamicCache | AttendingCache,
        positions: Tensor | None,
        first: Tensor | None,
        keep: int,
    ) -> Tensor | None:
        """[batch, kept, vocabulary], or None if the fast path does not support the cache."""
        ids = ids.contiguous()
        batch, tokens = ids.shape
        by_step = tokens == 1 and not self.why_not_in_one_call and batch <= MOST_TOKENS
        if hasattr(cache, "attend_new"):
            if first is not None and (tokens > 1 or not cache.knows_padding):
                return None
            if by_step:
                return self._between_attentions(ids, cache, positions)
            return self._reader(ids, cache, cache.get_seq_length(), keep=keep or tokens, positions=positions)
        rooms = roomy(self._reader.decoder, cache, batch, tokens)
        if rooms is None:
            return None
        slot = cache.get_seq_length()
        if positions is not None:
            positions = positions.expand(batch, -1)
            if bool((positions == torch.arange(slot, slot + tokens)).all()):
                positions = None
        if by_step and positions is None and first is None:
            bound = self._step(rooms, batch)
            bound.run(ids, slot)
            logits = bound.step.logits[:, None].to(self.model.dtype)
        elif by_step:
            logits = self._between_attentions(ids, LentRooms(self._reader.decoder, rooms, slot, first), positions)
        else:
            logits = self._reader(ids, rooms, slot, keep=keep or tokens, positions=positions, first=first)
        for block in self._reader.decoder.blocks:
            cache.layers[block.index].held = slot + tokens
        return logits

    def _between_attentions(self, ids: Tensor, cache: AttendingCache, positions: Tensor | None) -> Tensor:
        """Logits [batch, 1, vocabulary] of one token per sequence, where the cache computes the attention."""
        batch = len(ids)
        if batch not in self._in_parts:
            self._in_parts = {batch: StepInParts(self._reader.decoder, batch)}
        at = torch.full_like(ids, cache.get_seq_length()) if positions is None else positions.expand(batch, -1)
        self._in_parts[batch](ids, cache, at.contiguous())
        return self._in_parts[batch].logits

    def _step(self, rooms: list[LayerRoom], tokens: int) -> _Bound:
        """The step for these rooms and so many tokens or more; the step of the last cache is kept."""
        key = rooms[0].keys.data_ptr()
        bound = self._bound.get(key)
        other = bound is None or bound.step.step.program.tokens < tokens
        if other or any(a is not b for a, b in zip(bound.rooms, rooms, strict=True)):
            self._bound = {key: _Bound(rooms, step_of(self._reader.decoder, rooms, tokens))}
        return self._bound[key]


class StepsInOneCall:
    """Steps of decoding, each in one call of C++, in the cache that `generate` has made."""

    def __init__(self, acceleration: Acceleration, cache: DynamicCache, batch: int, tokens: int) -> None:
        self._acceleration, self._cache, self._batch, self._tokens = acceleration, cache, batch, max(batch, tokens)
        self._slot, self._room = cache.get_seq_length(), 0

    def __call__(self, tokens: Tensor) -> Tensor | None:
        """Read one more token per sequence, int64 [batch, 1]; returns those with the largest logits [batch, 1], or None
        if equal logits may hide which tokens transformers would take. Of one sequence, several tokens [1, n] can be
        read, as many as were announced; returns those [n, 1] behind each."""
        count = tokens.shape[1]
        if self._slot + count > self._room:
            self.finish()
            decoder = self._acceleration._reader.decoder
            rooms = roomy(decoder, self._cache, self._batch, count)
            self._bound, self._room = self._acceleration._step(rooms, self._tokens), rooms[0].keys.shape[2]
        largest = self._bound.run(tokens, self._slot)
        self._slot += count
        return None if self._bound.step.decoder.changes_logits else largest

    def cut(self, count: int) -> None:
        """Take the last `count` positions out of the cache."""
        self._slot -= count

    @property
    def logits(self) -> Tensor:
        """Of the last step, float32 [batch, vocabulary] or of each token of one sequence [n, vocabulary], rounded as
        the model's; valid until the next step."""
        logits = self._bound.step.logits
        changed = self._bound.step.decoder.changes_logits
        return logits.to(self._acceleration.model.dtype).float() if changed else logits

    def finish(self) -> None:
        """Let the cache know how many positions are in use."""
        for layer in self._cache.layers:
            if isinstance(layer, RoomyLayer):
                layer.held = self._slot


def _first_seen(mask: Tensor | None, total: int) -> Tensor | None:
    """int64 [batch], the number of padded places on the left; None: the mask is of another kind."""
    if mask is None:
        return torch.zeros(1, dtype=torch.int64)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != total:
        return None
    seen = mask != 0
    first = seen.to(torch.uint8).argmax(1)
    return first if bool((seen.sum(1) == total - first).all()) else None
