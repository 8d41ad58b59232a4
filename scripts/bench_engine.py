#!/usr/bin/env python3
"""Compare plain decoding through the engine with a bare loop over llama_decode, in interleaved runs.

    scripts/bench_engine.py                                   # the demo model
    scripts/bench_engine.py --target big-target.gguf          # see scripts/inflate_gguf.py

Both decode the same tokens with the same model file and number of threads, and their outputs must be equal.
`own` is the engine's time for sampling, rollback and bookkeeping, as a share of the bare loop's time per
token.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from time import perf_counter as now

import numpy as np

import edgespec
from edgespec.backends.llamacpp.loading import default_threads, model_params
from edgespec.backends.llamacpp.native import library

llama_cpp = library()

PROMPT = "Show me examples of `git commit`."


class BareLoop:
    """A minimal greedy decoding loop around llama_decode."""

    def __init__(self, path: str, context_tokens: int, threads: int) -> None:
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = (
            context_tokens,
            512,
            threads,
            threads,
        )
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def run(self, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        """Generate `count` tokens greedily. Return them and the time taken in seconds."""
        llama_cpp.llama_memory_clear(self.memory, True)
        self._decode(prompt[:-1], 0)
        token, tokens = prompt[-1], []
        started = now()
        for position in range(len(prompt) - 1, len(prompt) - 1 + count):
            self._decode([token], position)
            logits = llama_cpp.llama_get_logits_ith(self.context, 0)
            token = int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
            tokens.append(token)
        return tokens, now() - started

    def _decode(self, tokens: Sequence[int], position: int) -> None:
        self.batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self.batch.token[i], self.batch.pos[i] = token, position + i
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
            self.batch.logits[i] = i == len(tokens) - 1
        if llama_cpp.llama_decode(self.context, self.batch):
            raise SystemExit("error: llama_decode failed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per run")
    parser.add_argument("--runs", type=int, default=9, help="runs per side")
    args = parser.parse_args()

    with edgespec.load(args.target, draft="none", context=1024, method="none") as runtime:
        threads = default_threads(runtime.target.weight_bytes)
        bare = BareLoop(runtime.target.path, 1024, threads)
        prompt = runtime.vocabulary.tokenize(
            f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n", special=True, start=True
        )
        ratios, own_shares = [], []
        for run in range(args.runs + 1):
            # Alternate which side runs first, so that changes in the machine's speed affect both equally.
            if run % 2:
                tokens, bare_seconds = bare.run(prompt, args.tokens)
            stream = runtime.stream_tokens(prompt, max_tokens=args.tokens, temperature=0.0)
            for _ in stream:
                pass
            if not run % 2:
                tokens, bare_seconds = bare.run(prompt, args.tokens)
            stats = stream.reply.stats
            if list(stream.reply.tokens) != tokens[: len(stream.reply.tokens)]:
                raise SystemExit("error: the engine and the bare loop produced different tokens")
            if run == 0:
                continue  # The first run of each side is a warm-up.
            step = bare_seconds / args.tokens
            own = stats.sampling_seconds + stats.rollback_seconds + stats.overhead_seconds
            ratios.append(step / (stats.decode_seconds / stats.decoded_tokens))
            own_shares.append(own / stats.target_passes / step)
            print(
                f"run {run}: bare {1 / step:8.1f} tokens/s, "
                f"engine / bare {ratios[-1]:.3f}, own {own_shares[-1]:.2%}"
            )
        print(
            f"{runtime.target.description}, {args.runs} interleaved runs of {args.tokens} tokens: "
            f"engine / bare loop, median {statistics.median(ratios):.3f}; "
            f"engine's own time per round {statistics.median(own_shares):.2%} of a target step"
        )


if __name__ == "__main__":
    main()
