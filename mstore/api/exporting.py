"""Calls that bring snapshots to places where others find models.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstore.api.open_store import OpenStore
from mstore.store import contents
from mstore.store.contents import placing_damage

if TYPE_CHECKING:
    from mstore.exports.export import ExportReport
    from mstore.terms.ids import Revision
    from mstore.terms.report import ProgressCallback


class Exporting(OpenStore):
    """Calls that bring snapshots to places where others find models."""

    def export(
        self,
        revision: Revision,
        address: str,
        *,
        private: bool = False,
        branch: str | None = None,
        pull_request: bool = False,
        card: bool = True,
        message: str = "",
        dry_run: bool = False,
        progress: ProgressCallback | None = None,
    ) -> ExportReport:
        """Send the files of a snapshot to a place where others find models.

        The place has exactly these files afterwards, all in one step.  Files that it has are not
        sent again, and no copy of them lies on this machine's disk.  If the call is interrupted,
        the same call goes on.

        revision: a snapshot, or REF:MODEL.
        address: `hf://ORG/NAME[@BRANCH][/DIRECTORY]`, a model of the Hugging Face Hub, which is
        made if it is missing; or `oci://HOST/REPOSITORY[:TAG]`, a tag in an OCI registry.
        private: make it a private one. branch: the branch to write, which is made if it is missing;
        None: as the address says, else the main one. pull_request: propose the change as a pull
        request, and leave the branch.
        card: complete the README.md with what the store knows of the model: its bases, how it was
        made, licences, scores. False: README.md is sent as the snapshot has it.
        message: for the history of the place; empty: one that names the snapshot.
        dry_run: only report what would be sent.

        Raises NotFound, BadRequest, Conflict (the place changed meanwhile, or is public and a
        private one is wanted), Corrupt, Unavailable (the place does not answer, or does not let
        this user write); then the place is as it was.
        """
        from mstore.exports import export
        from mstore.exports.card import card as card_of
        from mstore.exports.destination import Wishes
        from mstore.store.block_cache import BlockCache
        from mstore.store.view import SnapshotView

        place = export.destination(address, Wishes(private, branch, pull_request))
        asked = self._whole(revision)
        with contents.held(self._catalog, [asked.snapshot]):
            cache = BlockCache(self._catalog, computing=self._computing)
            view = SnapshotView(self._catalog, asked.snapshot, cache, model=asked.model)
            with placing_damage(self._catalog, [asked.snapshot]):
                return export.export(
                    view,
                    place,
                    catalog=self._catalog,
                    memo=self._memo,
                    made=card_of(self._catalog, view, asked) if card else {},
                    message=message or f"Export of mstore snapshot {view.id.short}",
                    dry_run=dry_run,
                    progress=progress,
                )
