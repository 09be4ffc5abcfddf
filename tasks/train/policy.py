"""The policy: a transformers causal language model in a folder, and a canary that identifies its weights."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.policy import LoRA
from configs.train import Train
from storage.records import unpack_experts
from storage.versions.checkpoints import Canary
from storage.versions.model_files import ADAPTER_FILES
from storage.versions.weights import attach, empty_model, load_model, save, stored_name
from tasks.train.attention import use_trees
from tasks.train.batches import Places, Rows, batching_for, is_plain
from tasks.train.experts import KNOWN, in_files, read_rows, refuse_noise, replay_routing
from tasks.train.linear import use_onednn
from tasks.train.mesh import ALONE, Mesh
from tasks.train.passes import logprob_scorer, score_action_tokens
from tasks.train.samples import Logprobs, Tokens
from tasks.train.sharding import StoredTensors, class_of, fill, save_tensors, shard, whole

NumberFormat = Literal["float32", "bfloat16", "float16"]
CANARY_TOKENS = 256
"""The largest length of a canary. A server with a shorter context checks only the first tokens."""


def load_policy(folder: Path, train: Train, mesh: Mesh = ALONE, adapter: Path | None = None) -> PreTrainedModel:
    """Load a causal language model with float32 weights from safetensors, and set it up for training.

    With the folder of an adapter, only the adapter can be trained. On a mesh each rank reads only its own rows, one
    weight after the other.

    Raises:
        ValueError: `folder` holds no model, or its weights do not match its config.json; or it is a kind of model that
            cannot be divided among ranks, which read and write the files one weight after the other.
    """
    if mesh.size == 1:
        return set_up(load_model(folder, adapter), train)
    model, device, stored = empty_model(folder), device_of(train), StoredTensors(folder, "model")
    stored_buffers = model.state_dict().keys() & {name for name, _ in model.named_buffers()}
    expected = {of_file for name, value in model.named_parameters() for of_file in in_files(model, name, value)}
    if others := stored_buffers | expected - stored.names:
        raise ValueError(
            f"{folder} has no weights {min(others)} ({len(others)} in all): models whose files name other weights than "
            f"the model itself, except the experts of {', '.join(KNOWN)}, or hold more than weights are trained in one "
            "process"
        )
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    if adapter:
        attach(model, adapter)
    shard(_for_training(model, device, train), mesh)
    of_adapter = StoredTensors(adapter, Path(ADAPTER_FILES[1]).stem) if adapter else None

    def read(name: str, start: int, end: int) -> Tensor:
        if of_adapter and stored_name(name) in of_adapter.names:
            return of_adapter.rows(stored_name(name), start, end)
        shape = model.get_parameter(name).shape
        return read_rows(model, stored, name.replace(".base_layer.", "."), shape, start, end).float()

    fill(model, read, device)
    return model


def set_up(policy: PreTrainedModel, train: Train) -> PreTrainedModel:
    """Move a model onto `train.device` and let it compute in the way that is fastest there.

    The model is in evaluation mode, since dropout would make the trained policy differ from the sampled one. With
    gradient checkpointing it is in training mode, because transformers checkpoints only in that mode (current models
    have no dropout).
    """
    policy.to(device_of(train))  # type: ignore[arg-type]  # wrapped by a decorator without types
    for parameter in policy.parameters():
        parameter.data = parameter.data.clone()  # a mapped file has another alignment, which changes the last bits
    return _for_training(policy, policy.device, train)


def _for_training(policy: PreTrainedModel, device: torch.device, train: Train) -> PreTrainedModel:
    if device.type == "cpu":
        use_onednn(policy.base_model)
        if is_plain(policy.config):
            use_trees(policy)
    if is_plain(policy.config):  # the output layer of other models may have a bias
        policy.get_output_embeddings().rounds_factors = True  # under autocast, see `passes.float32_logits`
    if train.gradient_checkpointing:
        refuse_noise(policy)
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train(train.gradient_checkpointing)
    return policy


def save_policy(model: PreTrainedModel, folder: Path, mesh: Mesh = ALONE) -> None:
    """Write config.json and float32 weights: in one model.safetensors, or this rank's part.

    One process writes generation_config.json, too. Ranks have not read it: `VersionTrainer` copies it.
    """
    if mesh.size == 1:
        model.save_pretrained(folder, max_shard_size="1TB")
        return
    save_tensors(folder, "model", dict(model.named_parameters()), mesh, partial(in_files, model))
    if mesh.rank == 0:
        config = copy.deepcopy(model.config)
        config.architectures, config.dtype = [class_of(model).__name__], "float32"
        config.save_pretrained(folder)


def save_adapter(model: PreTrainedModel, lora: LoRA, folder: Path, mesh: Mesh = ALONE) -> None:
    """Write the attached adapter; on a mesh the first rank writes all of it."""
    tensors = {}
    for name, parameter in trained(model).items():
        value = whole(parameter.detach())  # by all ranks
        if mesh.rank == 0:
            tensors[stored_name(name)] = value.cpu().contiguous()
    if mesh.rank == 0:
        save(tensors, lora, folder)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name: all, or those of an adapter."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_canary(model: PreTrainedModel) -> Canary:
    """Compute the logprobs of 256 token ids (fewer if the model's context is shorter), in the precision of the weights.

    The ids depend only on the size of the vocabulary. A shorter canary has the first ids of a longer one.

    Raises:
        ValueError: a logprob is NaN or infinite, which can happen even with finite weights.
    """
    length = min(CANARY_TOKENS, getattr(model.config, "max_position_embeddings", CANARY_TOKENS))
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=length)
    tokens = torch.from_numpy(ids).to(model.device)[None]
    columns = torch.arange(1, length, device=model.device)
    with torch.no_grad():
        logp = logprob_scorer(model, 1.0)(Rows(tokens), Places(torch.zeros_like(columns), columns, columns - 1))
    if not logp.isfinite().all():
        remedy = "its weights overflow, or are NaN. Use another policy or checkpoint"
        raise ValueError(f"the policy's logprobs are NaN or infinite: {remedy}")
    return Canary(ids.tolist(), logp.tolist())


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The T tokens of one trajectory, as stored."""

    trajectory_id: str
    token_ids: list[int]  # T
    action_mask: list[bool]  # T
    sequence_starts: list[int]  # 1 or more
    experts: bytes | None = None  # that the engine chose (`records.pack_experts`); empty or None: unknown


def recompute(
    folder: Path,
    rows: Sequence[StoredTokens],
    temperature: float,
    number_format: NumberFormat = "float32",
    adapter: Path | None = None,
) -> list[Logprobs | None]:
    """Compute the logprobs [A] of each stored row's sampled tokens with the weights in a folder.

    The logprobs of a row that no model can score are None. If all rows have the experts of the engine, these are used.

    A row cannot be scored if it has no sampled tokens, a sampled token where a sequence begins, ids that the vocabulary
    does not have, a mask of another length than its tokens, or starts that do not begin at 0 and rise.

    Args:
        folder: folder of a transformers model.
        rows: the stored tokens.
        temperature: divides the logits, as in sampling.
        number_format: of weights, activations and logits, as in an engine that serves in it.
        adapter: folder of the policy's adapter, if any.

    Raises:
        ValueError: `folder` holds no model, or some of the weights are missing.
    """
    train = Train()
    torch.set_num_threads(train.threads)
    model = load_policy(folder, train, adapter=adapter).to(getattr(torch, number_format))
    usable = [index for index, row in enumerate(rows) if _usable(row, model.config.vocab_size)]
    if replayed := bool(rows) and all(row.experts for row in rows):
        replay_routing(model)
    scorer, tokens = logprob_scorer(model, temperature), [_tokens(row, replayed=replayed) for row in rows]
    logprobs = score_action_tokens(scorer, tokens, usable, batching_for(model, train))
    return [logprobs.get(index) for index in range(len(rows))]


def _usable(row: StoredTokens, vocabulary: int) -> bool:
    starts, length = row.sequence_starts, len(row.token_ids)
    return (
        len(row.action_mask) == length
        and any(row.action_mask)
        and starts[:1] == [0]
        and all(start < end for start, end in zip(starts, [*starts[1:], length], strict=True))
        and not any(row.action_mask[start] for start in starts)
        and min(row.token_ids) >= 0
        and max(row.token_ids) < vocabulary
    )


def _tokens(row: StoredTokens, *, replayed: bool) -> Tokens:
    starts, actions = np.array(row.sequence_starts), np.flatnonzero(row.action_mask)
    experts = unpack_experts(row.experts) if replayed and row.experts else None
    return Tokens(row.trajectory_id, "", np.array(row.token_ids), starts, actions, experts=experts)


def device_of(train: Train) -> torch.device:
    """Return the device of the trainer; several ranks of a host have chosen one GPU each (`torch.cuda.set_device`)."""
    if train.device != "auto":
        return torch.device(train.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
