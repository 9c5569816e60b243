"""Name what can go wrong for a user; the command line prints the sentence and exits with the code."""

from __future__ import annotations


class StarwheelError(Exception):
    """Say in one sentence what is wrong, where, and what to do."""

    exit_code = 2


class DataError(StarwheelError, ValueError):
    """Refuse an input that can't be read as preference pairs."""


class MissingDependencyError(StarwheelError, ImportError):
    """Say which package a named capability needs and how to install it."""


class StoreError(StarwheelError, OSError):
    """Report a store that can't be used: permissions, address, clock, an unsafe endpoint."""


class CorruptArtifactError(StoreError):
    """Report stored bytes that differ from their manifest: key, expected digest, digest found."""


class CommitUnknownError(StoreError):
    """Report a commit whose outcome could not be learnt; nothing was deleted, the next start resolves it."""


class HeldError(StarwheelError):
    """Refuse a run that another process holds and goes on with."""


class FencedError(StarwheelError):
    """Stop the holder of a run whose log was continued by a newer epoch."""

    exit_code = 3


class TransientError(StarwheelError):
    """Report a failure that a retry may mend (dead engine, lost connection, out of memory)."""

    exit_code = 4


class StepFailedError(StarwheelError):
    """Report a step that failed for good; what is committed stays."""

    exit_code = 1
