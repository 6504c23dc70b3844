"""Hugging Face transformers as an oracle: the same weights, all in float64, and an MTP layer built of its parts.

transformers casts to float32 inside its norms, rotary tables, router, index scores and softmax, whatever type the
weights have. `Float64Mode` turns each such cast into one to float64, while a model is built and while it runs.
"""

from contextlib import contextmanager

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reference.checkpoint import TensorReader

DERIVED_KEYS = ("mlp_layer_types", "layer_types")  # of num_hidden_layers; transformers makes them itself


class Float64Mode(TorchFunctionMode):
    """Every float32 that is asked for becomes float64. `choices`, if it is a list, collects the top-k calls."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[tuple[Tensor, Tensor]] | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(_widened(a) for a in args)
        result = function(*args, **{name: _widened(a) for name, a in (kwargs or {}).items()})
        if self.choices is not None and function in (torch.topk, torch.Tensor.topk):
            self.choices.append((args[0].clone(), result.indices.clone()))
        return result


def _widened(argument):
    return torch.float64 if argument is torch.float32 else argument


def hf_config(raw: dict):
    kind = transformers.CONFIG_MAPPING[raw["model_type"]]
    return kind(**{key: value for key, value in raw.items() if key not in ("model_type", *DERIVED_KEYS)})


class HfOracle:
    """A main model and, if the config has one, its MTP layer."""

    def __init__(self, raw: dict, reader: TensorReader) -> None:
        self.mode = Float64Mode()
        self.layers = raw["num_hidden_layers"]
        self.config = hf_config(raw)
        with self.mode:
            self.main = transformers.AutoModelForCausalLM.from_config(self.config, attn_implementation="eager")
            self.main.set_experts_implementation("eager")
            self.main.double().eval()
            fill(self.main, "", reader)
            self.mtp = None
            if raw.get("num_nextn_predict_layers"):
                self.config = hf_config(raw | {"num_hidden_layers": self.layers + 1})
                deeper = transformers.AutoModelForCausalLM.from_config(self.config, attn_implementation="eager")
                deeper.set_experts_implementation("eager")
                self.mtp = MtpParts(deeper, raw).double().eval()
                fill(self.mtp, f"model.layers.{self.layers}.", reader)

    @contextmanager
    def running(self):
        with torch.no_grad(), self.mode:
            yield

    def new_cache(self) -> transformers.DynamicCache:
        """transformers' own, empty, for all layers; the MTP layer's place is behind the main ones."""
        return transformers.DynamicCache(config=self.config)

    def forward(self, ids: Tensor, cache: transformers.DynamicCache | None = None) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, S, V]; and the residual stream before each layer, and at the end h after the final norm.

        With a cache, of the tokens behind those it holds.
        """
        with self.running():
            out = self.main(input_ids=ids, cache=cache, use_cache=cache is not None, output_hidden_states=True)
        return out.logits, list(out.hidden_states)

    def generate(self, ids: Tensor, new: int) -> tuple[Tensor, Tensor]:
        """transformers' own greedy generation: `new` tokens [B, new], and the logits [B, new, V] they came from."""
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=None, max_new_tokens=new)
        with self.running():
            self.main.generation_config = greedy
            out = self.main.generate(ids, output_logits=True, return_dict_in_generate=True)
        return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1)

    def forward_mtp(
        self, hidden: Tensor, ids: Tensor, cache: transformers.DynamicCache | None = None
    ) -> dict[str, Tensor]:
        """Row i: hidden state i and the token after it, [B, T, D] and [B, T]. With a cache, behind what it holds."""
        T = ids.shape[1]
        held = 0 if cache is None else cache.get_seq_length(self.layers)
        with self.running():
            positions = torch.arange(held, held + T)[None]
            embedded = self.main.model.embed_tokens(ids)
            z = self.mtp.eh_proj(torch.cat((self.mtp.enorm(embedded), self.mtp.hnorm(hidden)), dim=-1))
            future = torch.ones(T, held + T, dtype=torch.bool).triu(1 + held)
            mask = torch.zeros(T, held + T, dtype=z.dtype).masked_fill(future, torch.finfo(z.dtype).min)
            y = self.mtp.block(
                z,
                attention_mask=mask.expand(len(ids), 1, T, held + T),
                position_ids=positions,
                cache=cache,
                position_embeddings=self.main.model.rotary_emb(z, position_ids=positions),
            )
            normed = self.mtp.shared_head_norm(y)
            return {"proj": z, "block_out": y, "normed": normed, "logits": self.main.lm_head(normed)}

    def draft(self, hidden: Tensor, ids: Tensor, logits: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Greedy tokens [B, 1 + steps], the main model's first, and the drafting logits [B, steps, V].

        Each step runs all rows again: no cache is involved.
        """
        tokens = [logits[:, -1].argmax(dim=-1)]
        rows, kept = torch.cat((ids[:, 1:], tokens[0][:, None]), dim=1), []
        for _ in range(steps):
            out = self.forward_mtp(hidden, rows)
            kept.append(out["logits"][:, -1])
            tokens.append(kept[-1].argmax(dim=-1))
            rows = torch.cat((rows, tokens[-1][:, None]), dim=1)
            hidden = torch.cat((hidden, out["normed"][:, -1:]), dim=1)
        return torch.stack(tokens, dim=1), torch.stack(kept, dim=1)

    def draft_cached(
        self, hidden: Tensor, rows: Tensor, cache: transformers.DynamicCache, steps: int
    ) -> dict[str, Tensor]:
        """Hidden states after the norm [B, T + steps - 1, D], logits, and the greedy tokens [B, steps] of a draft.

        Step 0 has the T rows of `forward_mtp`, each later step one more; these leave the cache at the end.
        """
        normed, logits = [], []
        for _ in range(steps):
            out = self.forward_mtp(hidden, rows, cache)
            normed.append(out["normed"])
            logits.append(out["logits"])
            hidden, rows = normed[-1][:, -1:], logits[-1][:, -1:].argmax(dim=-1)
        cache.layers[self.layers].crop(1 - steps)
        whole = torch.cat(logits, dim=1)
        return {"normed": torch.cat(normed, dim=1), "logits": whole, "tokens": whole[:, -steps:].argmax(dim=-1)}


class MtpParts(nn.Module):
    """The parts of an MTP layer, of the classes that the main model has. Embedding and head are the main model's."""

    def __init__(self, deeper, raw: dict) -> None:
        super().__init__()
        D, norm = raw["hidden_size"], type(deeper.model.norm)
        self.enorm, self.hnorm, self.shared_head_norm = (norm(D, raw["rms_norm_eps"]) for _ in range(3))
        self.eh_proj = nn.Linear(2 * D, D, bias=False)
        self.block = deeper.model.layers[-1]


def fill(module: nn.Module, prefix: str, reader: TensorReader) -> None:
    """Copies the published tensors into a transformers module, which keeps the experts of a layer in two tensors."""
    for name, target in module.state_dict().items():
        published = prefix + name.removeprefix("block.").replace("shared_head_norm", "shared_head.norm")
        target.copy_(published_value(published, target, reader))


def published_value(name: str, target: Tensor, reader: TensorReader) -> Tensor:
    stem, _, last = name.rpartition(".")
    if not stem.endswith("mlp.experts"):
        return reader.tensor(name)
    parts = ["gate_proj", "up_proj"] if last == "gate_up_proj" else ["down_proj"]
    experts = [[reader.tensor(f"{stem}.{e}.{part}.weight") for part in parts] for e in range(len(target))]
    return torch.stack([torch.cat(expert) for expert in experts])
