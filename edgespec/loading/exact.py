"""Load a target with the passes and kernels that keep its replies identical to plain decoding.

The logits of a token can depend on the number of tokens that the model computes at once: the width of the
pass. Widths with equal logits, bit for bit, form a class (see `bit_exactness`). Which class is best, and
whether to repack the weights, depends on the machine: repacked weights are faster, but can have narrower
classes. Both are chosen by expected speed. The kernels that make widths agree can also be slower than those
without this restriction. The measurements for this are taken and saved when a model is first loaded on a
machine with a given build of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from edgespec.errors import EdgespecError
from edgespec.loading.attention_speed import AttentionSpeed, compare_attention
from edgespec.loading.bit_exactness import WidthClass, find_width_classes, restricted_to
from edgespec.loading.constants import (
    COMPARED_REPEATS,
    COMPARED_SECONDS,
    COMPARED_WIDTHS,
    EQUALLY_FAST,
    HEAD_COST,
    MAX_PLAIN_LOSS,
    MIN_EXACT_SPEED,
    REPEATING_RATE,
    TEXT_RATE,
)
from edgespec.loading.pair_loading import load_target
from edgespec.loading.pairing import ModelPair
from edgespec.methods.costs.curve import CostCurve, measure_costs
from edgespec.methods.costs.target_costs import TargetCosts, settings_key, streaming_key
from edgespec.model.base import LanguageModel, LoadOptions, Progress
from edgespec.model.model_facts import Exactness
from edgespec.store.constants import ASSUMED_SIZE_RATIO, HEAD_RATE
from edgespec.store.speedup_estimate import estimate_acceptance_rate, measured_acceptance_rate
from edgespec.system.cores import CPU_LOAD, MAX_BUSY_CORES, CpuReading, usable_cores
from edgespec.system.facts import Facts


@dataclass(frozen=True, slots=True)
class DraftingForecast:
    """The expected acceptance rate and cost of drafting for a target.

    Attributes:
        acceptance_rate: Fraction of drafted tokens that the target accepts.
        token_cost: Time to draft one token, as a multiple of a single-token target pass.
    """

    acceptance_rate: float
    token_cost: float

    def speed(self, seconds: Callable[[int], float], widths: Sequence[int]) -> float:
        """Return the expected tokens per second with the best draft length.

        Args:
            seconds: Returns the duration of a pass of a given width.
            widths: The allowed pass widths. Narrower passes are padded.
        """
        step = seconds(1)
        best = 1.0 / seconds(widths[0])
        rates = accumulate([self.acceptance_rate**depth for depth in range(1, widths[-1])])
        for drafted, accepted in enumerate(rates, 1):
            padded = next(width for width in widths if width > drafted)
            best = max(best, (1.0 + accepted) / (drafted * self.token_cost * step + seconds(padded)))
        return best


def forecast_drafting(pair: ModelPair) -> DraftingForecast:
    """Forecast drafting with the pair's draft model or head, or from earlier text if it has neither."""
    if pair.draft is not None:
        rate = measured_acceptance_rate(pair.target, pair.draft)
        try:
            target, draft = (each.file_format.read_info(each.path) for each in (pair.target, pair.draft))
            ratio = draft.parameters / max(target.parameters, 1)
        except EdgespecError:
            ratio = ASSUMED_SIZE_RATIO
        return DraftingForecast(estimate_acceptance_rate(ratio) if rate is None else rate, min(ratio, 1.0))
    if pair.heads:
        return DraftingForecast(HEAD_RATE, HEAD_COST)
    return DraftingForecast(TEXT_RATE, 0.0)


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A loaded target whose passes are restricted, unless its `facts.exactness` says otherwise.

    Attributes:
        models: One model for each concurrent reply.
        costs: The pass costs of the target.
        options: The options that the target was loaded with.
    """

    models: Sequence[LanguageModel]
    costs: TargetCosts
    options: LoadOptions

    @property
    def exactness(self) -> Exactness:
        found = self.models[0].facts.exactness
        assert found is not None
        return found

    def close(self) -> None:
        for model in self.models:
            model.close()


@dataclass(frozen=True, slots=True)
class _Choice:
    """A class of pass widths and the load options that it applies to.

    Attributes:
        found: The class, or None if passes are unrestricted.
        repack: Whether the weights are repacked.
        speed: Expected speed, as a fraction of the speed with `--exactness off`. None if it was not measured.
        threads: Number of CPU threads for which the class was found.
        exact: Whether to use kernels that do not depend on the pass width. See `LoadOptions.exact`.
        prompt_speed: Speed of reading long prompts, as a fraction of that with `--exactness off`.
    """

    found: WidthClass | None
    repack: bool
    speed: float | None
    threads: int = 0
    exact: bool = True
    prompt_speed: float = 1.0


class _ClassSpeed(NamedTuple):
    """The expected speeds of a class of pass widths, in tokens per second.

    Attributes:
        typical: Speed on average, with the drafters at hand.
        repeating: Speed for repetitive text.
        plain: Speed of plain decoding.
        found: The class.
        repack: Whether the weights are repacked.
    """

    typical: float
    repeating: float
    plain: float
    found: WidthClass
    repack: bool


@dataclass(frozen=True, slots=True)
class _TrialResult:
    """The result of testing one configuration, which does not depend on the drafters.

    Attributes:
        classes: The width classes that the trial found.
        seconds: Returns the duration of a pass of a given width. None if durations were not needed.
        threads: Number of CPU threads in the trial. 0 if the backend does not choose it.
        is_disturbed: Whether other programs were busy, so that the trial must be repeated when the machine is
            idle.
        attention: Speeds relative to those with the attention kernels of `--exactness off`. None if the
            kernels are the same, or if the weights are not repacked.
    """

    classes: Sequence[WidthClass]
    seconds: Callable[[int], float] | None
    threads: int
    is_disturbed: bool
    attention: AttentionSpeed | None = None


# Identifies the version of the trial in saved results. Change it whenever the trial can detect more
# differences or measures more, so that models are tested again.
_TRIAL = "first and output layers, f16 keys, long contexts with MLX, unpadded prompts"
_Loader: TypeAlias = Callable[[LoadOptions], LoadedTarget]


def load_exact_target(
    pair: ModelPair,
    options: LoadOptions,
    requested: str,
    *,
    exits_early: bool,
    measures_costs: bool,
    file_states: Sequence[str],
    progress: Progress | None,
) -> LoadedTarget:
    """Load a target and restrict it to passes that agree bit for bit, as `exactness` requests.

    Args:
        pair: The target, its draft model and heads.
        options: The target's load options. Their fields `exact` and `repack` are ignored.
        requested: The option `exactness`: `auto`, `bits` or `off`.
        exits_early: Whether to draft with the lower layers of the target, whose passes cannot be padded.
        measures_costs: Whether to measure multi-token passes. See `TargetCosts`.
        file_states: Identifies the target's files. If empty, nothing is saved.
        progress: Called during loading and the trial. Returning False cancels them with CancelledError.

    Raises:
        EdgespecError: The target cannot be loaded.
    """

    def load(changed: LoadOptions) -> LoadedTarget:
        models = load_target(pair, changed, progress)
        with ExitStack() as undo:
            for model in models:
                undo.callback(model.close)
            costs = TargetCosts(models[0], changed, measures_costs)
            costs.choose_threads(progress)
            undo.pop_all()
        return LoadedTarget(models, costs, changed)

    if unrestricted := _unrestricted(options, requested):
        # Passes stay unrestricted, because `exact` only selects kernels whose results depend less on the pass
        # width.
        loaded = load(replace(options, exact=requested != "off"))
        return _described(loaded, unrestricted)
    return _ExactLoading(pair, options, requested, exits_early, load, file_states, progress).run()


def _unrestricted(options: LoadOptions, requested: str) -> Exactness | None:
    """Return the report for options with which passes are not restricted, or None if the target is tested."""
    if requested == "off":
        cause, why = "exactness", "--exactness off allows it"
    elif options.workers is not None:
        cause, why = "workers", "edgespec does not test this with workers"
    elif options.parallel > 1:
        cause = "parallel"
        why = "replies are computed together (--parallel); --exact runs them one after the other"
    else:
        return None
    outcome = f"can differ from plain decoding due to rounding, because {why}"
    return Exactness(requested, False, outcome, cause=cause)


def _described(loaded: LoadedTarget, exactness: Exactness) -> LoadedTarget:
    for model in loaded.models:
        model.facts = replace(model.facts, exactness=exactness)
    return loaded


@dataclass
class _ExactLoading:
    """Tests a target's configurations, saves the results, and loads the best one.

    The result of a trial does not depend on the drafters, but the choice of a configuration does.
    """

    pair: ModelPair
    options: LoadOptions
    requested: str
    exits_early: bool
    load: _Loader
    file_states: Sequence[str]
    progress: Progress | None
    # The target, as loaded in the most recently tested configuration.
    _loaded: LoadedTarget | None = None
    # Measured pass durations, keyed by whether the weights were repacked.
    _curves: dict[bool, CostCurve] = field(default_factory=dict)

    def run(self) -> LoadedTarget:
        try:
            choice = self._choose()
            wanted = replace(self._options(choice.repack), exact=choice.exact)
            if self._loaded is not None and self._loaded.options != wanted:
                self._close()
            loaded, self._loaded = self._loaded or self.load(wanted), None
        finally:
            self._close()
        loaded = self._restricted(loaded, choice)
        curve = self._curves.get(choice.repack)
        if curve is not None and choice.found is not None and choice.found.is_contiguous:
            loaded.costs.save(curve.up_to(choice.found.max_width))
        return loaded

    def _options(self, repack: bool) -> LoadOptions:
        return replace(self.options, exact=True, repack=repack)

    def _close(self) -> None:
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def _choose(self) -> _Choice:
        """Return the best configuration, from saved trials where possible."""
        first = self._trial(repack=True)
        attention = first.attention or AttentionSpeed(1.0, 1.0)
        slowest = min(1.0, attention.decoding)
        # Even if passes are unrestricted, kernels that do not depend on the pass width keep replies close to
        # plain decoding, so use them unless they are slow.
        unrestricted = _Choice(None, True, slowest, exact=slowest >= MIN_EXACT_SPEED)
        if first.seconds is None:
            if self.requested == "auto" and not unrestricted.exact and not first.is_disturbed:
                return unrestricted
            # Restrict passes even though all tested widths agree, because the trial may have been slowed down
            # by other programs and tested only narrow passes.
            return _Choice(first.classes[0], True, slowest, first.threads, prompt_speed=attention.prompt)
        forecast = forecast_drafting(self.pair)
        free = forecast.speed(first.seconds, COMPARED_WIDTHS), _repeating(first.seconds, COMPARED_WIDTHS)
        plain = 1.0 / first.seconds(1)
        choices = self._speeds(forecast, first.classes, first.seconds, plain, repack=True)
        if not choices:
            return replace(unrestricted, speed=None)
        can_change = self.pair.target.backend.repacks(self.pair.target.path, self._options(repack=True))
        fastest = max((each.typical, each.repeating) for each in choices)
        is_disturbed, threads = first.is_disturbed, {True: first.threads}
        if can_change and (fastest[0] < free[0] or fastest[1] < free[1]):
            second = self._trial(repack=False)
            is_disturbed = is_disturbed or second.is_disturbed
            threads[False] = second.threads
            seconds = second.seconds or first.seconds
            choices += self._speeds(forecast, second.classes, seconds, plain, repack=False)
        best = _best(choices)
        found, repack = best.found, best.repack
        # Plain decoding must be fast too, because drafting does not pay for every text.
        speed = min(1.0, attention.decoding * min(best.plain / plain, best.typical / free[0]))
        if found.max_width == 1:
            # Without drafting, repetitive text would lose most of its speed-up.
            speed = min(speed, attention.decoding * best.repeating / free[1])
        # Speeds distorted by other programs do not justify giving up identical replies.
        is_fast = speed >= MIN_EXACT_SPEED or (is_disturbed and found.is_contiguous and found.max_width > 1)
        if self.requested == "auto" and not is_fast:
            # Estimate the speed with `bits`, which either pads plain decoding or does without drafting.
            seconds = first.seconds
            bits_speed = attention.decoding * max(
                min(seconds(1) / seconds(each.widths[0]), _repeating(seconds, each.widths) / free[1])
                for each in first.classes
            )
            return replace(unrestricted, speed=min(slowest, bits_speed))
        return _Choice(found, repack, speed, threads[repack], prompt_speed=attention.prompt)

    def _trial(self, *, repack: bool) -> _TrialResult:
        """Return the saved trial result of a configuration, or load the target and run the trial.

        The classes do not depend on how many layers are streamed, but the durations do, so only these are
        measured again if another number of layers is streamed.
        """
        any_key = self._key(repack)
        key = any_key + streaming_key(self.options)
        if (saved := self._saved(key)) is not None:
            return saved
        other = self._saved(any_key)
        if other is not None and other.seconds is None:
            return other
        self._close()
        if other is None:
            self._loaded, result = self._try_one(repack=repack)
        else:
            self._loaded = self.load(self._options(repack))
            began = CPU_LOAD.reading()
            seconds = self._measure(self._loaded.models[0], repack=repack)
            result = replace(other, seconds=seconds, is_disturbed=_was_disturbed(began))
        if self.file_states:
            Facts().put("classes", dict.fromkeys((any_key, key), _to_json(result)))
        return result

    def _saved(self, key: str) -> _TrialResult | None:
        """Return a saved trial result, unless other programs disturbed it and the machine is now idle."""
        saved = _from_json(Facts().get("classes", key)) if self.file_states else None
        # On a machine that is always busy, remeasuring at every start would not give better results.
        return saved if saved is not None and (not saved.is_disturbed or _machine_is_busy()) else None

    def _key(self, repack: bool) -> str:
        context_tokens = self.options.context_tokens or 0
        return repr(
            (
                _TRIAL,
                self.pair.target.backend.build_identity(),
                settings_key(self._options(repack)),
                tuple(self.file_states),
                # A trial on a single core cannot tell whether results depend on the thread count.
                usable_cores(),
                min(context_tokens, 2048),
                self.options.max_branches,
            )
        )

    def _try_one(self, *, repack: bool) -> tuple[LoadedTarget, _TrialResult]:
        """Load the target in a configuration, and run the trial."""
        options = self._options(repack)
        loaded = self.load(options)
        try:
            model = loaded.models[0]
            began = CPU_LOAD.reading()
            classes = find_width_classes(model, self.progress)
            is_needed = not (repack and classes[0].is_complete)
            seconds = self._measure(model, repack=repack) if is_needed else None
            off = replace(options, exact=False)
            attention = compare_attention(model, options, off, self.progress) if repack else None
            return loaded, _TrialResult(classes, seconds, model.max_threads, _was_disturbed(began), attention)
        except BaseException:
            loaded.close()
            raise

    def _measure(self, model: LanguageModel, *, repack: bool) -> Callable[[int], float]:
        curve = measure_costs(
            model,
            COMPARED_WIDTHS,
            repeats=COMPARED_REPEATS,
            budget_seconds=COMPARED_SECONDS,
            progress=self.progress,
        )
        model.truncate(0)
        self._curves[repack] = curve
        return _duration(curve)

    def _speeds(
        self,
        forecast: DraftingForecast,
        classes: Sequence[WidthClass],
        seconds: Callable[[int], float],
        unrestricted_plain: float,
        *,
        repack: bool,
    ) -> list[_ClassSpeed]:
        """Return the expected speeds of each usable class.

        Args:
            forecast: The expected acceptance rate and cost of drafting.
            classes: The classes.
            seconds: Returns the duration of a pass of a given width.
            unrestricted_plain: Speed of plain decoding without padding and with repacked weights.
            repack: Whether the weights are repacked.
        """
        speeds = []
        for found in classes:
            plain = 1.0 / seconds(found.widths[0])
            can_exit = found.is_contiguous or not self.exits_early
            if self.requested == "bits" or (can_exit and unrestricted_plain <= (1 + MAX_PLAIN_LOSS) * plain):
                typical, repeating = forecast.speed(seconds, found.widths), _repeating(seconds, found.widths)
                speeds.append(_ClassSpeed(typical, repeating, plain, found, repack))
        return speeds

    def _restricted(self, loaded: LoadedTarget, choice: _Choice) -> LoadedTarget:
        found = choice.found
        exactness = _exactness(self.requested, choice)
        loaded.costs.fixes_threads = found is not None and not found.any_threads
        for model in loaded.models:
            capabilities = model.facts.capabilities
            if found is not None:
                capabilities = restricted_to(capabilities, found)
                if not found.any_threads:
                    model.set_max_threads(choice.threads)
                model.fix_threads(not found.any_threads)
            model.facts = replace(model.facts, capabilities=capabilities, exactness=exactness)
        return loaded


def _machine_is_busy() -> bool:
    return CPU_LOAD.busy_cores() > MAX_BUSY_CORES


def _was_disturbed(began: CpuReading) -> bool:
    """Return whether other programs have used much CPU time since measurements began."""
    return CPU_LOAD.busy_cores_since(began) > MAX_BUSY_CORES


def _repeating(seconds: Callable[[int], float], widths: Sequence[int]) -> float:
    return DraftingForecast(REPEATING_RATE, 0.0).speed(seconds, widths)


def _best(choices: Sequence[_ClassSpeed]) -> _ClassSpeed:
    fastest = max(choice.typical for choice in choices)
    equal = [choice for choice in choices if choice.typical >= (1.0 - EQUALLY_FAST) * fastest]
    return max(equal, key=lambda choice: choice.repeating)


def _exactness(requested: str, choice: _Choice) -> Exactness:
    found, speed = choice.found, choice.speed
    more_time = f"{1 / speed - 1:.0%}" if speed is not None and speed < 0.995 else ""
    if found is None:
        cost = f", but takes about {more_time} more time" if more_time else ""
        outcome = f"can differ from plain decoding due to rounding; --exact prevents that{cost}"
        return Exactness(requested, False, outcome, (), speed)
    if found.max_width == 1:
        outcome = (
            "are identical to plain decoding, because edgespec generates one token at a time here;"
            " --exactness off allows drafting, but rounding can then change replies"
        )
    else:
        outcome = (
            f"are identical to plain decoding: checking {found.text} tokens at once gives exactly the same"
            " results"
        )
        gains = [f"is up to {more_time} faster"] if more_time else []
        if choice.prompt_speed < MIN_EXACT_SPEED:
            gains.append(f"reads long prompts up to {1 / choice.prompt_speed - 1:.0%} faster")
        if gains:
            outcome += f"; --exactness off {' and '.join(gains)}, but rounding can then change replies"
    return Exactness(requested, True, outcome, found.widths, speed)


def _to_json(result: _TrialResult) -> dict[str, Any]:
    seconds = result.seconds
    return {
        "classes": [
            {
                "widths": list(map(int, found.widths)),
                "flags": list(
                    map(bool, (found.trees, found.any_threads, found.is_complete, found.is_cut_short))
                ),
                "block": found.block_tokens,
            }
            for found in result.classes
        ],
        "seconds": seconds and [seconds(width) for width in COMPARED_WIDTHS],
        "threads": result.threads,
        "disturbed": result.is_disturbed,
        "attention": result.attention,
    }


def _from_json(saved: Any) -> _TrialResult | None:
    try:
        classes = [_class_from_json(each) for each in saved["classes"]]
        seconds = saved["seconds"]
        if seconds is not None:
            seconds = _duration(CostCurve(COMPARED_WIDTHS, tuple(map(float, seconds))))
        threads, is_disturbed = int(saved["threads"]), bool(saved["disturbed"])
        attention = saved["attention"] and AttentionSpeed(*map(float, saved["attention"]))
        return _TrialResult(classes, seconds, threads, is_disturbed, attention) if classes else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _class_from_json(saved: Any) -> WidthClass:
    widths = tuple(int(width) for width in saved["widths"])
    trees, any_threads, is_complete, is_cut_short = map(bool, saved["flags"])
    block = int(saved["block"])
    if list(widths) != sorted(set(widths)) or min(widths, default=0) < 1 or block < 1:
        raise ValueError("invalid widths")
    return WidthClass(widths, trees, block, any_threads, is_complete, is_cut_short)


def _duration(curve: CostCurve) -> Callable[[int], float]:
    return lambda width: curve.v(width) * curve.target_step_seconds
