"""Keep one generation of what an unfinished step needs to go on: files first, then the record that names them.

It is never a result: losing it costs time and nothing else, and it is deleted once the step has its manifest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from storage import checkpoint, failpoint, layout, record
from storage.attempt import READ_BACK_BYTES
from storage.backend import NotFoundError
from storage.cache import download
from storage.digest import digest_json
from storage.errors import CorruptArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from storage.backend import Backend


@dataclass(frozen=True)
class StepState:
    """Hold the state inside attempt `number` of the step `key`; the last one put counts."""

    key: str
    number: int
    backend: Backend

    def put(self, folder: Path, fields: Mapping[str, Any]) -> None:
        """Store a flat folder of safetensors and JSON in place of the generation before, which is then deleted.

        `fields` go into the record. A step that was committed meanwhile keeps nothing.
        """
        paths = checkpoint.checked(folder)
        entries = [checkpoint.entry(path) for path in paths.values()]
        files = [asdict(entry) for entry in entries]
        generation = digest_json(files)
        before = self._generation()
        for entry in entries:
            self.backend.put_file(
                self._file(generation, entry.name),
                paths[entry.name],
                sha256=entry.sha256,
                read_back=entry.bytes <= READ_BACK_BYTES,
            )
        failpoint.hit(f"state {self.key} payload stored")
        where = layout.state(self.key, self.number)
        self.backend.put(where, record.encode({"generation": generation, "files": files, "fields": dict(fields)}))
        if before is not None and before != generation:
            self._delete(layout.state_folder(self.key, self.number, before))
        if self.backend.size(layout.manifest(self.key, self.number)) is not None:
            self.discard()

    def newest(self) -> Mapping[str, Any] | None:
        """Return the fields of the generation that counts, None where there is none; CorruptArtifactError."""
        found = self._record()
        return None if found is None else found["fields"]

    def fetch(self, folder: Path) -> None:
        """Download the generation that counts into an empty folder; CorruptArtifactError where a byte is wrong."""
        found = self._record()
        if found is None:
            raise CorruptArtifactError(f"{self.backend.address(layout.state(self.key, self.number))} is missing")
        for fields in found["files"]:
            entry = checkpoint.parse_entry(fields, self.backend.address(layout.state(self.key, self.number)))
            where = self._file(found["generation"], entry.name)
            download(self.backend, where, folder / entry.name, sha256=entry.sha256, size=entry.bytes)
        checkpoint.checked(folder)

    def discard(self) -> None:
        """Delete the record, then every file, also those that no record names because their writer was killed."""
        self.backend.delete(layout.state(self.key, self.number))
        self._delete(layout.state_folder(self.key, self.number))

    def _record(self) -> dict[str, Any] | None:
        try:
            return record.read(self.backend, layout.state(self.key, self.number))[0]
        except NotFoundError:
            return None

    def _generation(self) -> str | None:
        try:
            found = self._record()
        except CorruptArtifactError:  # it is replaced now; its files go when the step is done
            return None
        return None if found is None else str(found["generation"])

    def _file(self, generation: str, name: str) -> str:
        return f"{layout.state_folder(self.key, self.number, generation)}{layout.name(name)}"

    def _delete(self, prefix: str) -> None:
        for key in list(self.backend.list(prefix)):
            self.backend.delete(key)
