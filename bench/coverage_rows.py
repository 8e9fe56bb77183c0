"""Rows of the coverage benchmark: check, timing and count of one model make one row. Not a program.

A timing measures memory, too; where memory alone was measured after it, those figures stand in their place.

Parts need not be of one commit, since all of them take most of an hour: each names its own (``check_commit``
and so on). The row's ``commit`` is that of the part that came last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import schema

if TYPE_CHECKING:  # it imports torch, which tables are made without
    from coverage_subject import Job

Row = dict[str, Any]
KINDS = ("check", "time", "count", "memory")
MEMORY = ("peak_allocated_mb", "peak_reserved_mb", "device_used_mb")


def row_key(job: Job) -> tuple[str, ...]:
    """The identity of the row that a job contributes to."""
    return schema.identity(blank(job))


def blank(job: Job) -> Row:
    """A row with nothing measured."""
    return {
        "bench": job.bench,
        "config": job.model,
        "mode": job.mode,
        "scope": "model",
        "backend": job.backend,
        # Compiled from whatever the machine's cache holds: no cold compile time.
        "inductor_cache": "the machine's",
        **dict.fromkeys(schema.FIGURES[job.bench]),
    }


def combine(old: Mapping[str, Any] | None, job: Job, fields: Mapping[str, Any]) -> Row:
    """The row after `job`: what its other parts measured stays, as in `old`.

    The timing's compile and capture times win over the check's, whose first step includes eager's. The
    profiler's memory, which a count's process holds, is no figure.
    """
    replaced = ("status", *(("memory_status", "memory_s", "memory_commit") if job.kind == "time" else ()))
    kept = {} if old is None else {key: value for key, value in old.items() if key not in replaced}
    ignored = ("status", "child_s", *(("device_used_mb",) if job.kind == "count" else ()))
    fresh = {key: value for key, value in fields.items() if key not in ignored}
    if job.kind == "memory":
        fresh = {key: value for key, value in fresh.items() if key in MEMORY}
    if job.kind == "check" and kept.get("time_status") == "ok":
        fresh = {key: value for key, value in fresh.items() if key not in ("compile_s", "capture_s")}
    row = {**blank(job), **kept, **fresh}
    row |= {f"{job.kind}_status": fields["status"], f"{job.kind}_s": fields.get("child_s")}
    bad = [f"{row[key]}" for kind in KINDS if row.get(key := f"{kind}_status", "ok") != "ok"]
    return {**row, "status": bad[0] if bad else "ok"}


def part_commit(row: Mapping[str, Any], kind: str) -> str | None:
    """The commit at which that part of a row was measured; None if it was not."""
    if not row.get(f"{kind}_status"):
        return None
    found: str | None = row.get(f"{kind}_commit") or row.get("commit")
    return found


class Rows:
    """The rows of a result file, kept up to date on disk.

    Args:
        path: the file; it may not exist yet.
        header: of this run.
        as_good: commits whose measurements count as this run's commit's.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], as_good: Sequence[str] = ()) -> None:
        self.path, self.header = path, header
        self._good = (header["commit"], *as_good)
        found = schema.read(path)["rows"] if path.exists() else []
        self.rows = {schema.identity(row): dict(row) for row in found}

    def done(self, job: Job) -> bool:
        """Whether the file has this job's part already, of a commit that counts, and it went well."""
        row = self.rows.get(row_key(job), {})
        return row.get(f"{job.kind}_status") == "ok" and part_commit(row, job.kind) in self._good

    def add(self, job: Job, fields: Mapping[str, Any]) -> Row:
        """Merge a job's fields and write the file."""
        key = row_key(job)
        old = self.rows.get(key)
        commit = self.header["commit"]
        commits = {kind: part_commit(old, kind) for kind in KINDS} if old is not None else {}
        commits[job.kind] = commit
        row = combine(old, job, fields) | {"commit": commit, "date": self.header["date"]}
        row |= {f"{kind}_commit": one for kind, one in commits.items() if one and row.get(f"{kind}_status")}
        schema.write(self.path, [row], self.header)
        self.rows[key] = schema.with_defaults(row)
        return row

    def all(self) -> Sequence[Row]:
        return list(self.rows.values())
