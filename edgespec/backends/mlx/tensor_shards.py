"""Shard every layer of an MLX model across workers (tensor parallelism).

mlx-lm's models shard their attention heads and feed-forward layers as in Megatron-LM (Shoeybi et al., 2019,
section 3). Each layer then needs two all-reduce operations over the workers.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.backends.mlx.absent_layers import check_separable
from edgespec.backends.mlx.build_info import mlx_core
from edgespec.errors import CapabilityError
from edgespec.model.formats.mlx_metadata import language_config

__all__ = ["ShardIndex", "shard_for_transfer", "shard_model"]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Selects one shard of a model.

    mlx-lm accepts it in place of a process group, as long as no pass runs.

    Attributes:
        index: The index of the shard.
        count: Number of shards.
    """

    index: int
    count: int

    def rank(self) -> int:
        """Return the index. mlx-lm calls this."""
        return self.index

    def size(self) -> int:
        """Return the number of shards. mlx-lm calls this."""
        return self.count


def shard_for_transfer(model: Any, config: Mapping[str, Any], name: str, shard: ShardIndex) -> None:
    """Replace each layer of a model with one of its shards. The model's weights must be lazy.

    The shard's weights can then be evaluated and sent to a worker. Passes compute only this shard, so their
    results are meaningless, but their arrays have the same shapes as on the worker.

    Args:
        model: The model.
        config: The model's config.json.
        name: The model's name, for messages.
        shard: The shard.

    Raises:
        CapabilityError: The layers cannot be sharded across this number of workers.
    """
    shard_model(model, config, name, shard)
    # Without environment variables for a ring, this is a group of just this process.
    alone = mlx_core().distributed.init(backend="ring")
    for module in model.modules():
        for attribute, value in vars(module).items():
            if value is shard:
                setattr(module, attribute, alone)
    try:
        check_separable(model, name)
    except CapabilityError:
        raise
    except Exception as error:
        # For example, there may be more workers than KV heads.
        raise _error(name, shard, error) from error
    # Collect the replaced modules and the traced graph, which contain reference cycles. They refer to whole
    # weights, which would stay in memory once a shard of them is evaluated.
    gc.collect()


def shard_model(model: Any, config: Mapping[str, Any], name: str, group: Any) -> None:
    """Replace each layer of a model with the shard that one worker runs.

    Args:
        model: The model.
        config: The model's config.json.
        name: The model's name, for messages.
        group: The process group of the workers, whose rank selects the shard. Can be a `ShardIndex`.

    Raises:
        CapabilityError: The layers cannot be sharded across this number of workers.
    """
    divide = getattr(model, "shard", None)
    if divide is None:
        raise _error(name, group, "mlx-lm cannot divide models of its architecture")
    # mlx-lm would silently round down the number of heads and compute wrong results.
    settings = language_config(dict(config))
    heads = settings.get("num_attention_heads")
    for number, kind in ((heads, "attention"), (settings.get("num_key_value_heads", heads), "key-value")):
        if not isinstance(number, int) or number % group.size():
            raise _error(name, group, f"it has {number} {kind} {'head' if number == 1 else 'heads'}")
    try:
        divide(group)
    except Exception as error:
        raise _error(name, group, error) from error


def _error(name: str, group: Any, reason: object) -> CapabilityError:
    text = " ".join(str(reason).split())
    return CapabilityError(
        f"the layers of {name} cannot be divided among {group.size()} workers: {text}",
        "use --split-mode layer, or another number of workers",
        code="workers_not_supported",
    )
