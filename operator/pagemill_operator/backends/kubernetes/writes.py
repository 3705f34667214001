"""Performs the writes of one deployment's turn and collects their errors. `differences` decides what to write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError, Unreachable
from pagemill_kube.kinds import Kind
from pagemill_operator.backends.kubernetes.deletion_cost import PodNote
from pagemill_operator.backends.kubernetes.differences import Answers
from pagemill_operator.backends.kubernetes.kinds import BY_NAME, POD
from pagemill_operator.backends.kubernetes.ownership import Children, is_ending, is_own
from pagemill_operator.backends.kubernetes.render.names import AWAKE_ANNOTATION
from pagemill_operator.backends.kubernetes.slim import slim
from pagemill_operator.backends.kubernetes.snapshot import ApplyError, Manifest

logger = logging.getLogger("pagemill.operator.kubernetes")

MOST_NOTES = 8
"""Pods that are annotated at a time: a change of the list of adapters concerns all pods of a model."""

OnWrite = Callable[[str, str], None]
"""Called with the kind and the verb of a write."""


class KnownChildren(Protocol):
    """The cache that stores the answers to writes."""

    def put(self, kind: str, manifest: Manifest) -> set[str]: ...
    def remove(self, kind: str, namespace: str, name: str, uid: str | None = None) -> set[str]: ...


class _NotOwned(Exception):
    """Raised if an object that the operator does not own has the name."""


class Writes:
    def __init__(
        self, client: Client, known: KnownChildren, owner: Manifest, answers: Answers, on_write: OnWrite
    ) -> None:
        self._client = client
        self._known = known
        self._owner = owner
        self._answers = answers
        self._on_write = on_write
        self.errors: list[ApplyError] = []
        self.transient_errors: list[ApplyError] = []
        """Errors of the turn that may not recur."""
        self.transient_error: ApiError | Unreachable | None = None
        """The last temporary error."""
        self.has_written = False

    def has_failed(self, kinds: Iterable[str]) -> bool:
        """Whether an object of `kinds` was not written, or a temporary error occurred."""
        return self.transient_error is not None or any(error.kind in kinds for error in self.errors)

    async def apply(self, manifests: Iterable[Manifest], live: Children) -> None:
        await asyncio.gather(*(self._apply(manifest, live) for manifest in manifests))

    async def delete(self, manifests: Iterable[Manifest]) -> None:
        for manifest in manifests:
            await self._noted(manifest, "delete", self._deleted(manifest))

    async def scale(self, deployment: Manifest, replicas: int, awake: str | None) -> None:
        """Set the replicas and the awake annotation on the version of the Deployment that they were decided on."""
        await self._noted(deployment, "scale", self._scaled(deployment, replicas, awake))

    async def adopt(self, orphans: Iterable[tuple[Manifest, Manifest]]) -> None:
        """Give each second object the owner of the first, on the version that was seen; its content stays."""
        for manifest, orphan in orphans:
            await self._noted(orphan, "adopt", self._adopted(manifest, orphan))

    async def annotate(self, notes: Iterable[PodNote]) -> None:
        """Annotate pods. These are only hints: an error is no fault of the deployment."""
        room = asyncio.Semaphore(MOST_NOTES)

        async def annotated(note: PodNote) -> None:
            async with room:
                await self._annotated(note)

        await asyncio.gather(*map(annotated, notes))

    async def _annotated(self, note: PodNote) -> None:
        metadata = note.pod["metadata"]
        self._on_write(POD.name, "annotate")
        patch = {"metadata": {"annotations": {note.annotation: note.value}}}
        try:
            answer = await self._client.merge(POD, metadata["namespace"], metadata["name"], patch)
        except (ApiError, Unreachable) as error:
            logger.info("%s of pod %s was not written: %s", note.annotation, metadata["name"], error)
            return
        self._known.put(POD.name, answer)

    async def _apply(self, manifest: Manifest, live: Children) -> None:
        is_known = (manifest["kind"], manifest["metadata"]["name"]) in live
        await self._noted(manifest, "apply", self._applied(manifest, is_known=is_known))

    async def _noted(self, manifest: Manifest, verb: str, writing: Awaitable[None]) -> None:
        """Perform a write and record its error with the deployment."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self._on_write(kind, verb)
        self.has_written = True
        try:
            await writing
        except ApiError as error:
            self._add_error(kind, name, error)
        except Unreachable as error:
            self.transient_error = error
            self.transient_errors.append(ApplyError(kind, name, 0, "Unreachable", str(error), is_transient=True))
        except _NotOwned:
            message = (
                f"a {kind} named {name} exists and belongs to something else: "
                "delete or rename it, or give the LLMDeployment another name"
            )
            self.errors.append(ApplyError(kind, name, 409, "AlreadyExists", message))

    def _add_error(self, kind: str, name: str, error: ApiError) -> None:
        met = ApplyError(kind, name, error.status, error.reason, error.message, is_transient=error.is_transient)
        if error.is_transient:
            self.transient_error = error
            self.transient_errors.append(met)
        else:
            self.errors.append(met)

    async def _applied(self, manifest: Manifest, *, is_known: bool) -> None:
        kind = BY_NAME[manifest["kind"]]
        force = is_known or await self._may_update(kind, manifest)
        answer = await self._client.apply(kind, manifest, force=force)
        self._answers.note(manifest, slim(kind.name, answer))
        self._known.put(kind.name, answer)

    async def _may_update(self, kind: Kind, manifest: Manifest) -> bool:
        """Whether the object exists and may be updated. Raise `_NotOwned` if it is not the operator's."""
        metadata = manifest["metadata"]
        found = await self._client.find(kind, metadata["namespace"], metadata["name"])
        if found is None:
            return False
        if is_ending(found):
            raise ApiError(409, "AlreadyExists", f"{kind.name} {metadata['name']} is still being deleted")
        if not is_own(found, self._owner):
            raise _NotOwned
        return True

    async def _deleted(self, manifest: Manifest) -> None:
        kind, metadata = BY_NAME[manifest["kind"]], manifest["metadata"]
        await self._client.delete(kind, manifest)
        self._known.remove(kind.name, metadata["namespace"], metadata["name"], metadata["uid"])

    async def _adopted(self, manifest: Manifest, orphan: Manifest) -> None:
        kind, metadata = BY_NAME[orphan["kind"]], orphan["metadata"]
        notes = {
            "resourceVersion": metadata["resourceVersion"],
            "ownerReferences": manifest["metadata"]["ownerReferences"],
        }
        answer = await self._client.merge(kind, metadata["namespace"], metadata["name"], {"metadata": notes})
        self._known.put(kind.name, answer)

    async def _scaled(self, deployment: Manifest, replicas: int, awake: str | None) -> None:
        kind, metadata = BY_NAME[deployment["kind"]], deployment["metadata"]
        notes = {"resourceVersion": metadata["resourceVersion"], "annotations": {AWAKE_ANNOTATION: awake}}
        patch = {"metadata": notes, "spec": {"replicas": replicas}}
        answer = await self._client.merge(kind, metadata["namespace"], metadata["name"], patch)
        self._known.put(kind.name, answer)
