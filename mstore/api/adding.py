"""Calls that fill a store: settings, checkpoints, statistics.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from mstore import fs
from mstore.api.open_store import OpenStore, local_path, thread_count
from mstore.store import config, contents, leases
from mstore.store.catalog import Catalog
from mstore.store.contents import placing_damage
from mstore.store.leaning import leaning_of
from mstore.store.leases import Lease
from mstore.store.refs import refs_in
from mstore.terms.errors import BadRequest, Conflict
from mstore.terms.ids import Revision
from mstore.terms.phrases import Option, call, few, phrase
from mstore.terms.sizes import format_size

if TYPE_CHECKING:
    from mstore.checkpoint.conversion import ConversionLimits
    from mstore.checkpoint.directory import Checkpoint, CheckpointLimits
    from mstore.checkpoint.exclusion import Exclusion
    from mstore.merge.combination.combine import CombineReport
    from mstore.models.adapters.convert import ConvertReport
    from mstore.models.adapters.extract import ExtractReport
    from mstore.models.cast import CastReport
    from mstore.models.stats.analysis import AnalyzeReport
    from mstore.origins.outdated import OriginState
    from mstore.snapshots.add import AddReport, Base
    from mstore.terms.report import ProgressCallback
    from mstore.terms.requests import Experts


class Adding(OpenStore):
    """Calls that fill a store: settings, checkpoints, statistics."""

    @property
    def config(self) -> Mapping[str, str | int]:
        """Return every setting of the store with its value: see `configure`."""
        return self._catalog.config.values()

    def configure(self, key: str, value: str | int) -> None:
        """Change a setting, for this store and everyone who opens it later.

        key: codec says which codecs new blocks may use (auto, raw, dense); reflog_days says for how
        many days the reflog keeps what refs pointed at; shared says who besides the owner may use
        what is created in the store (umask, group, all); filesystem is set by `vouch`;
        require_signed says whether `fetch`, `pull` and a copy to this store move refs only to
        snapshots with a good signature of a trusted key (True, False).
        value: the new value. group and all also apply to files that already exist.

        Raises BadRequest (an unknown key or a bad value), StorageFailed (another user must share
        something first).
        """
        parsed = config.typed(key, value) if isinstance(value, str) else value
        self._catalog.configure({key: parsed})

    @staticmethod
    def vouch(path: str | Path, filesystem: str) -> Mapping[str, str | int]:
        """Allow a store to lie on a type of filesystem that mstore does not know as local.

        The owner vouches that it behaves like a local one: locks and shared maps hold for all who
        use the store.  Also works for a store that `open` refuses where it lies.

        filesystem: a type as in /proc/self/mountinfo, or "" for none.

        Returns all settings of the store.  Raises NotFound, Incompatible (another format), Corrupt,
        BadRequest, StorageFailed.
        """
        return config.vouch(local_path(path), filesystem).values()

    def add(
        self,
        path: str | Path,
        *,
        name: str,
        candidate: str | None = None,
        base: Revision | None = None,
        detect_base: bool = False,
        kind: str = "full",
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        default_excludes: bool = True,
        codec: str | None = None,
        message: str = "",
        threads: int | None = None,
        convert: ConversionLimits | None = None,
        limits: CheckpointLimits | None = None,
        progress: ProgressCallback | None = None,
    ) -> AddReport:
        """Store a checkpoint directory, or one .safetensors file, under the ref `name`.

        path: the directory, the file, a model of a Hugging Face cache
        (`mstore.checkpoint.tree.cached_model` finds it by its id), or an address: of a model on the
        Hub, `hf://ORG/NAME[@REVISION][/DIRECTORY]`, or of an artifact in a registry,
        `oci://HOST/REPOSITORY[:TAG|@DIGEST]`. Their files are stored as they arrive; a call that
        was interrupted goes on with the next file.
        candidate: a word for this run.  Then it is published as the run's candidate for the branch,
        `candidates/RUN/NAME`, and the branch stays, as for `merge`.
        base: the revision that the checkpoint was tuned from.  The call also stores statistics of
        the differences; merges are planned from them.
        detect_base: if no base is named, find the nearest of the stored snapshots; the report says
        which one and why.
        kind: full; or delta: the tensors are differences to the base, and base + difference is
        stored, in the base's types and files.  A tensor that is missing is the base's.
        only, skip: patterns of the tensors to compare with the base; these must agree in name and
        shape.  With kind delta, those that they leave out are the base's.
        include: patterns of files to take, in the same syntax as `exclude`; none: all files.
        exclude: patterns of files and directories to leave out, in the syntax of gitignore(5); they
        apply after those of the directory's own `.mstoreignore`.  The report names what was left
        out.
        default_excludes: start with the patterns for files that are not part of a model
        (`mstore.checkpoint.exclusion`).
        codec: auto, raw or dense; None uses the store's setting.
        message: the reason, in words. A snapshot of a Hugging Face cache also tells its origin:
        address, revision and commit.
        threads: the most threads to use; None means one per processor.
        convert: load pickled weights in a child process with these limits, and store them as
        safetensors.
        limits: how large the checkpoint may be; raise them for a trusted checkpoint that was
        refused.  By default, sparse files may be as large as the free space on the store's disk.
        progress: called now and then with the work done so far.

        An add that loses its ref to a writer that has since exited runs again.

        Raises BadCheckpoint, BadName, BadRequest (kind), Conflict, Incompatible, NotFound,
        StorageFailed, and Unavailable (conversion without torch, a place that does not answer);
        then the branch stays.
        """
        began = time.monotonic()
        from mstore.checkpoint.exclusion import Exclusion
        from mstore.origins.places import is_address
        from mstore.snapshots.add import add
        from mstore.store.objects.shapes import require_patterns
        from mstore.store.transaction import branch_to_move

        if kind not in ("full", "delta"):
            raise BadRequest(f"no kind of checkpoint is {kind!r}: full or delta", where="kind")
        if kind == "delta" and base is None:
            raise BadRequest(
                "differences are added to a base, and none is named", hint=Option("base", "REF")
            )
        policy = self._policy(codec)
        branch_to_move(self._catalog, name, candidate)
        for option, patterns in ((Option("only"), only), (Option("skip"), skip)):
            require_patterns(patterns, option)
        exclusion = Exclusion.chosen(exclude, include, defaults=default_excludes)
        if not is_address(str(path)) or os.path.lexists(path):
            place = self._scanned(local_path(path), convert, limits, exclusion)
        else:
            _refuse_elsewhere(str(path), kind, convert)
            place = self._elsewhere(str(path), limits, exclusion, progress)
        with place as (checkpoint, remarks):
            chosen = replace(
                self._base(checkpoint, base, detect=detect_base),
                only=tuple(only),
                skip=tuple(skip),
            )
            if kind == "delta" and base is not None:
                self._real(base)
                self._input(base)
            held = [] if chosen.snapshot is None else [chosen.snapshot]
            with contents.held(self._catalog, held):
                one_add = partial(
                    add,
                    self._catalog,
                    self._statistics,
                    checkpoint,
                    name=name,
                    candidate=candidate,
                    base=chosen,
                    kind="delta" if kind == "delta" else "full",
                    policy=policy,
                    message=message,
                    threads=thread_count(threads),
                    progress=progress,
                )
                report = unless_overtaken(self._catalog, name, one_add)
        if codec == "raw":
            files = self._catalog.manifest(report.manifest).files
            remarks += self._still_coded(files, report.blocks_total, name)
        leans = leaning_of(self._catalog, self._catalog.manifest(report.manifest))
        remarks += tuple(
            phrase(
                "its differences lean on {count} blocks ({size}) that are only at {remote}; to "
                "have them here: {prefetch}",
                count=one.blocks,
                size=format_size(one.bytes),
                remote=one.remote,
                prefetch=call("prefetch", name),
            )
            for one in leans
        )
        return replace(
            report,
            remarks=remarks + report.remarks + _idle(exclusion, checkpoint),
            # With the scan, and the search for a base.
            seconds=time.monotonic() - began,
        )

    @contextmanager
    def _scanned(
        self,
        path: Path,
        convert: ConversionLimits | None,
        limits: CheckpointLimits | None,
        exclusion: Exclusion,
    ) -> Iterator[tuple[Checkpoint, tuple[str, ...]]]:
        """Yield a checkpoint, converted if the caller asked for it, with remarks.

        Converted files lie in the store's tmp/ until the block ends, under a lease: after a kill
        the next writer removes them.
        """
        from mstore.checkpoint.directory import DEFAULT_LIMITS, scan

        allowed = limits or DEFAULT_LIMITS
        if allowed.max_sparse_bytes is None:
            allowed = replace(allowed, max_sparse_bytes=fs.free_bytes(self.path))
        if convert is None:
            yield scan(path, limits=allowed, exclusion=exclusion), ()
            return
        from mstore.checkpoint import conversion

        lease = Lease(self._catalog.layout, self._catalog.index, f"convert {path.name}")
        try:
            made = conversion.convert(
                path,
                lease.directory,
                limits=convert,
                checkpoint_limits=allowed,
                exclusion=exclusion,
            )
            found = scan(path, limits=allowed, replacement=made.replacement, exclusion=exclusion)
            yield found, made.remarks
        finally:
            lease.release()

    @contextmanager
    def _elsewhere(
        self,
        address: str,
        limits: CheckpointLimits | None,
        exclusion: Exclusion,
        progress: ProgressCallback | None,
    ) -> Iterator[tuple[Checkpoint, tuple[str, ...]]]:
        """Yield a checkpoint at a place.  What it needs on disk lies in tmp/, under a lease."""
        from mstore.checkpoint.directory import DEFAULT_LIMITS
        from mstore.origins.files import scanned
        from mstore.origins.places import opened

        lease = Lease(self._catalog.layout, self._catalog.index, f"download {address}")
        try:
            found = scanned(
                opened(address, lease.directory),
                self._catalog,
                lease.directory,
                limits=limits or DEFAULT_LIMITS,
                exclusion=exclusion,
                progress=progress,
            )
            with contents.held(self._catalog, found.relied):
                yield found.checkpoint, ()
        finally:
            lease.release()

    def missing_base(self, address: str) -> str | None:
        """Return the address of the base that the card of a checkpoint elsewhere names.

        None if it names none, or one from which the store has a snapshot.

        Raises BadRequest (no address, a card that names several), NotFound, Unavailable.
        """
        from mstore.origins.files import has_model
        from mstore.origins.hub import Address
        from mstore.origins.places import opened

        # Nothing of it is read, so nothing comes to lie there.
        bases = opened(address, self._catalog.layout.tmp).bases
        if len(bases) > 1:
            raise BadRequest(
                f"its card names several bases: {few(bases)}",
                where=address,
                hint=call("add", f"hf://{bases[0]}", name="REF"),
            )
        if not bases or has_model(self._catalog, bases[0]):
            return None
        return str(Address.parse(f"hf://{bases[0]}"))

    def outdated(self, names: Sequence[str] = ()) -> list[OriginState]:
        """Return whether the origins of snapshots have newer revisions; asks them.

        names: branches, tags or other revisions; without any, all branches whose snapshots came
        from elsewhere. The origins of a named snapshot that was made here are those of the
        snapshots that it was made of.  An origin that does not answer is one in the list.

        Raises NotFound, BadName, Corrupt, and Unavailable (the library for the Hub is missing).
        """
        from mstore.origins.outdated import states
        from mstore.store.refs import BRANCH

        if names:
            return states(self._catalog, [(name, self._catalog.resolve(name)) for name in names])
        branches = (
            (name, ref.snapshot_id())
            for name, ref in self._catalog.refs().items()
            if ref.kind == BRANCH
        )
        own = [one for one in branches if self._catalog.snapshot(one[1]).origin is not None]
        return states(self._catalog, own)

    def _base(self, checkpoint: Checkpoint, base: Revision | None, *, detect: bool) -> Base:
        """Return the base to compare a checkpoint with: named, detected, or none."""
        from mstore.snapshots.add import NO_BASE, Base

        if base is not None:
            own = self._stored(base)
            return Base(own.snapshot, None, given=True, model=own.model)
        if not detect:
            return NO_BASE
        from mstore.snapshots.nearest import nearest

        found = nearest(self._catalog, checkpoint)
        return Base(found.snapshot, found.reason, given=False)

    def extract_lora(
        self,
        expert: Revision,
        base: Revision,
        *,
        name: str,
        rank: int = 32,
        dtype: str | Any = "bfloat16",
        format: str = "peft",
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        message: str = "",
        progress: ProgressCallback | None = None,
    ) -> ExtractReport:
        """Store expert minus base as a LoRA adapter, under the ref `name`.

        Each matrix and each convolution that differs becomes a product of two factors, by a
        truncated singular value decomposition; norms and biases that differ are stored whole.  The
        report says what share of the difference is left out.

        rank: of each product, 1 to 4096.
        dtype: of the factors, bfloat16, float16 or float32, by name or as torch or numpy has it.
        format: of its files: "peft"; for image models "kohya" or "diffusers", one file without a
        config, which has products only: what differs otherwise is left out, and the report says so.
        only, skip: patterns of tensor names; tensors that they leave out are neither compared nor
        read.
        message: the reason, in words.

        On one machine the same models give the same factors; another machine may sum in another
        order.

        Raises NotFound, BadRequest (a rank, a dtype, a virtual merge), Incompatible (different
        tensors or shapes, an adapter), Conflict, Corrupt, StorageFailed; then nothing is published.
        """
        from mstore.models.adapters.extract import extract
        from mstore.numeric.codes import output_dtype
        from mstore.terms.requests import dtype_name

        sides = [(str(one), self._input(one).snapshot) for one in (expert, base)]
        with contents.held(self._catalog, [id for _, id in sides]):
            return extract(
                self._catalog,
                *sides,
                name=name,
                rank=rank,
                dtype=output_dtype(str(dtype_name(dtype))),
                format=format,
                only=tuple(only),
                skip=tuple(skip),
                message=message,
                progress=progress,
            )

    def convert_adapter(
        self,
        adapter: Revision,
        base: Revision,
        *,
        name: str,
        format: str,
        dtype: str | Any | None = None,
        message: str = "",
    ) -> ConvertReport:
        """Store a LoRA adapter in the format of another program, under the ref `name`.

        base: the model that it is of, whose layers the format names.
        format: "peft", "kohya" or "diffusers".
        dtype: of the factors; None for the adapter's own. Factors that stay as they are share their
        blocks with the adapter; LoHa, LoKr and others become products, in float32.
        message: the reason, in words.

        Raises NotFound, BadRequest (a format), Incompatible (no adapter of this base, tensors that
        are no products, layers that the format has no name for), Conflict, Corrupt, StorageFailed;
        then nothing is published.
        """
        from mstore.models.adapters.convert import convert
        from mstore.numeric.codes import output_dtype
        from mstore.terms.requests import dtype_name

        own, model = self._input(adapter), self._input(base)
        with contents.held(self._catalog, [own.snapshot, model.snapshot]):
            return convert(
                self._catalog,
                own,
                model,
                name=name,
                format=format,
                dtype=None if dtype is None else output_dtype(str(dtype_name(dtype))),
                message=message,
            )

    def cast(
        self,
        revision: Revision,
        *,
        dtype: str | Any | None = None,
        scaled: bool = False,
        without: Sequence[str] = (),
        take: Revision | None = None,
        below: str = "",
        channels_of: Revision | None = None,
        strip_prefix: str = "",
        prefix: str = "",
        name: str | None = None,
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        message: str = "",
        allow_nonfinite: bool = False,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> CastReport:
        """Store a model again with elements of another type, other tensors or other names.

        Merging computes with bfloat16, float16 and float32; models in other types are cast first.
        Each element is rounded once, to nearest, ties to even.  Weights in float8 with scales
        (DeepSeek's and Qwen's blocks, compressed-tensors, ComfyUI's single files) become what they
        stand for: their product in float32, rounded to the new type.  Scales are dropped, and
        config.json no longer states a quantization.  Tensors that have the type, integers and
        others are shared.

        dtype: bfloat16, float16, float32, float64, float8_e4m3fn or float8_e5m2, by name or as
        torch or numpy has it.  None: every tensor keeps its own.
        scaled: with float8_e4m3fn, cast only the matrices of layers (of a whole checkpoint, those
        of its diffusion model), each divided by a scale of its own, and add the scales and the mark
        by which ComfyUI knows them.  Otherwise elements in 8 bits get no scales.
        without: patterns of tensors that the new model does not have.
        take, below: another model, REF or REF:MODEL, whose tensors take the place of those whose
        names begin with `below`: a VAE that is baked in, below `first_stage_model.`.  If names in
        the other model begin so, these are taken as they are called; else all, with `below` before
        their names.  Names and shapes agree, but for optional tensors; `without` makes room for
        others.
        channels_of: a model; tensors that differ from it in input channels alone get as many.  They
        keep their own first ones, and what they lack is the other model's: so a model of four
        channels merges into one for inpainting, of nine.
        strip_prefix, prefix: what names lose where they begin so, and what they then get.
        Patterns match the names before that.  A tensor whose bytes stay takes no space again.
        name: the ref; None means `cast/MODEL-DTYPE`, without a type `cast/MODEL-reshaped`.
        only, skip: patterns of tensor names; tensors that they leave out stay as they are, and so
        do the other models of a snapshot of which REF:MODEL names one.
        message: the reason, in words.
        allow_nonfinite: also publish a model in which elements became infinite.
        threads: the most threads to use; None means one per processor.

        Elements that are too large become infinite, in float8_e4m3fn 448, as in torch; the report
        counts them.

        Raises NotFound, BadRequest (a dtype, a virtual merge, no such pattern or prefix, nothing to
        do), Incompatible (tensors that cannot take the place of others, scales that are missing or
        of another form, another quantization, elements that became infinite), BadName, Conflict,
        Corrupt, StorageFailed; then nothing is published.
        """
        from mstore.models.cast import cast
        from mstore.models.reshape import Reshape
        from mstore.numeric.codes import cast_dtype
        from mstore.terms.requests import dtype_name

        wanted = None if dtype is None else cast_dtype(str(dtype_name(dtype)))
        model = self._input(revision)
        reshape = Reshape(
            tuple(without),
            None if take is None else self._input(take),
            below,
            None if channels_of is None else self._input(channels_of),
            strip_prefix,
            prefix,
        )
        used = [model, *reshape.others]
        with contents.held(self._catalog, [one.snapshot for one in used]):
            return cast(
                self._catalog,
                (model.name, model.snapshot),
                of=model.model,
                dtype=wanted,
                scaled=scaled,
                reshape=reshape,
                name=name,
                only=tuple(only),
                skip=tuple(skip),
                message=message,
                allow_nonfinite=allow_nonfinite,
                threads=thread_count(threads),
                progress=progress,
            )

    def combine_adapters(
        self,
        experts: Experts,
        method: str,
        *,
        name: str,
        parameters: Mapping[str, object] | None = None,
        rank: int | None = None,
        dtype: str | Any | None = None,
        base: Revision | None = None,
        message: str = "",
        progress: ProgressCallback | None = None,
    ) -> CombineReport:
        """Combine several adapters of one base into one, and store it under the ref `name`.

        Methods and parameters are those of PEFT's `add_weighted_adapter` (docs/howto/adapters.md),
        and of combinations by spectra (docs/howto/spectra.md).

        experts: LoRA adapters: revisions, pairs of a revision and its weight, or weights by
        revision.
        method: cat, linear, ties, dare_linear, dare_ties, magnitude_prune, which combine factors;
        svd, ties_svd, dare_linear_svd, dare_ties_svd, magnitude_prune_svd, which combine products
        and truncate the result; ties_core, dare_linear_core, dare_ties_core, magnitude_prune_core,
        which combine products in the space that the factors span; tsv, svc, iso_c, iso_cts,
        wudi_ridge, which combine singular values and vectors there.
        parameters: by name: density (must be given), majority_sign_method (total or frequency),
        clamp (a quantile), seed; alpha of svc, common_space_fraction of iso_cts, ridge of
        wudi_ridge.
        rank: for methods that truncate, 1 to 4096; None takes the largest of the adapters' for svd
        and its like, the sum of the adapters' for the others, which then leave nothing out.
        dtype: of the factors, bfloat16, float16 or float32; None takes the adapters' own, float32
        if they have several.
        base: the model that the adapters are of; None takes the one that they were added with.  It
        is read if adapters have tensors that are not products (norms, biases), whose differences
        to it are combined.
        message: the reason, in words.

        Raises NotFound, BadRequest (a method, a parameter, a rank, a dtype), Incompatible (no
        adapters, adapters that cannot be combined, no base), Conflict, Corrupt, StorageFailed; then
        nothing is published.
        """
        from mstore.merge.combination.combine import combine
        from mstore.merge.combination.methods import setting_of
        from mstore.merge.methods.parameters import finite_single
        from mstore.numeric.codes import output_dtype
        from mstore.terms.requests import dtype_name, weighted

        setting = setting_of(method, parameters or {})
        adapters = []
        for revision, weight in weighted(experts):
            finite_single(f"the weight of {revision}", weight)
            adapters.append((str(revision), self._input(revision).snapshot, float(weight)))
        model = None if base is None else self._input(base)
        used = [id for _, id, _ in adapters] + ([] if model is None else [model.snapshot])
        with contents.held(self._catalog, used):
            return combine(
                self._catalog,
                adapters,
                setting,
                name=name,
                rank=rank,
                dtype=None if dtype is None else output_dtype(str(dtype_name(dtype))),
                base=model,
                message=message,
                progress=progress,
            )

    def analyze(
        self,
        expert: Revision,
        base: Revision,
        *,
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> AnalyzeReport:
        """Compute the missing statistics of expert minus base; existing ones are kept.

        Merges are planned from them.  `add` with a base has already computed them.

        only, skip: patterns of tensor names, as in `plan`; tensors that they leave out are neither
        compared nor read.

        Raises NotFound, BadRequest (a virtual merge, no such pattern), Incompatible (different
        tensors or shapes), Corrupt, StorageFailed (statistics are missing, and this user may only
        read the store).
        """
        from mstore.models.stats.analysis import analyze

        sides = [self._input(one) for one in (expert, base)]
        with placing_damage(self._catalog, (side.snapshot for side in sides)):
            return analyze(
                self._catalog,
                self._statistics,
                *sides,
                only=only,
                skip=skip,
                threads=thread_count(threads),
                progress=progress,
            )


def _refuse_elsewhere(address: str, kind: str, convert: ConversionLimits | None) -> None:
    """Refuse what needs all files at once.  Raises BadRequest."""
    if kind == "full" and convert is None:
        return
    from mstore.origins.places import by_hand

    download, downloaded = by_hand(address)
    option = Option("convert") if convert is not None else Option("kind", kind)
    raise BadRequest(
        phrase("{option} needs all files on this machine", option=option),
        where=address,
        hint=phrase(
            "{download}, then {add}",
            download=download,
            add=call("add", downloaded, name="REF", **{option.name: option.value or True}),
        ),
    )


def _idle(exclusion: Exclusion, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return remarks about requested patterns that excluded nothing."""
    decided = {one.pattern for one in checkpoint.excluded}
    return tuple(
        phrase("{exclude} left nothing out", exclude=Option("exclude", (pattern.text,)))
        for pattern in exclusion.asked
        if not pattern.takes_back and pattern not in decided
    )


T = TypeVar("T")
ATTEMPTS = 3


def unless_overtaken(catalog: Catalog, name: str, attempt: Callable[[], T]) -> T:
    """Run `attempt`, which moves the ref `name`; run it again if a dead writer moved it first.

    A writer that is killed while it commits may leave a commit that becomes visible only when the
    next writer begins; the user could only run the command again.

    `attempt` reads the ref itself, and leaves nothing behind if it fails. Raises Conflict if others
    are at work, or after ATTEMPTS tries, and whatever `attempt` raises.
    """
    for _ in range(ATTEMPTS - 1):
        before = _moves(catalog, name)
        try:
            return attempt()
        except Conflict:
            if _moves(catalog, name) == before or leases.live(catalog.layout):
                raise
    return attempt()


def _moves(catalog: Catalog, name: str) -> int:
    """Return how often the ref has moved so far."""
    with catalog.index.env.read() as transaction:
        return refs_in(catalog.index, transaction).count_moves(name)
