"""The error tree of the services.

::

    CkptError                    a failure with an exit status; what the command line prints in one line
    ├── UsageError               64: wrong use; nothing was changed
    ├── UnavailableError          4: the store could not be reached, or did not say whether it wrote
    │   ├── NoStoreError             the store answered: it is not there, or not for us
    │   ├── ThrottledError           the store is busy and wants to be asked again later
    │   └── UnseenDirectoryError     another machine has just made it, and it is not to be seen here yet
    ├── NothingToVerifyError      3: there is no checkpoint there
    ├── FencedError               1: a later term has been elected; this writer may append nothing more
    └── StoreError                2: what the store holds is wrong
        ├── AlreadyExistsError       create() lost: the key has an object
        ├── MissingObjectError       no object of that key
        │   └── UnseenObjectError     4: not to be seen on a file system of the network: not yet, or it was removed
        ├── CorruptObjectError       an object whose bytes are not those that were written
        └── LogCorruptError          LOG_CORRUPT: a log record that is damaged or illegal

Foreign errors (``OSError``, those of an S3 client) stop at the object stores, which translate them once.
"""

from __future__ import annotations

from typing import ClassVar


class CkptError(Exception):
    """A failure that the command line reports in one line, with the exit status of its class."""

    exit_status: ClassVar[int] = 1


class UsageError(CkptError):
    """Wrong use: nothing was changed, and the message says what to do."""

    exit_status: ClassVar[int] = 64


class UnavailableError(CkptError):
    """The store could not be reached, or did not answer: a write may have landed or may still land."""

    exit_status: ClassVar[int] = 4


class NoStoreError(UnavailableError):
    """The store answered that it is not there, or not for these credentials: no waiting helps, a person must."""


class ThrottledError(UnavailableError):
    """The store is busy and wants to be asked again later."""


class UnseenDirectoryError(UnavailableError):
    """A directory that another machine has just made is not to be seen here yet; nothing was written."""


class NothingToVerifyError(CkptError):
    """There is no checkpoint where one was asked for."""

    exit_status: ClassVar[int] = 3


class FencedError(CkptError):
    """A later term has been elected: this writer may append nothing more."""


class StoreError(CkptError):
    """What the store holds is not what was written or expected."""

    exit_status: ClassVar[int] = 2


class AlreadyExistsError(StoreError):
    """``create`` found an object of that key; nothing was written."""


class MissingObjectError(StoreError):
    """There is no object of that key."""


class UnseenObjectError(MissingObjectError):
    """It is not to be seen here, however often it was looked for: it may be there for others, or have been removed."""

    exit_status: ClassVar[int] = 4


class CorruptObjectError(StoreError):
    """An object does not have the digest or the form that its name or its manifest gives."""


class LogCorruptError(StoreError):
    """A record of the job log is damaged or illegal. Readers stop here and change nothing; they never skip."""
