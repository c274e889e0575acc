"""Credentials for S3 where the environment has none: of profiles and SSO, as boto3 finds them.

boto3 is optional. obstore reads variables and the machine's role, and no profiles. Owns which of
the two looks for credentials, and what its errors mean. They stay in boto3 and obstore: no error,
file or pickle has them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from obstore.auth.boto3 import Boto3CredentialProvider

_GIVEN: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
"""Variables by which obstore finds credentials, or needs none."""
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
# boto3 renews credentials at the latest ten minutes before they end.
_KEPT: Final = timedelta(minutes=10)


def credentials() -> Profile | None:
    """Return what looks for credentials in profiles; None: obstore is to look for them."""
    if any(os.environ.get(name) for name in _GIVEN):
        return None
    return Profile() if importlib.util.find_spec("boto3") is not None else None


class Profile:
    """Credentials of the profile that AWS_PROFILE names, else of the default one.

    A credential provider of obstore. It looks for them when a remote at S3 is opened, and then
    raises Unavailable if there are none.
    """

    @property
    def config(self) -> dict[str, str]:
        """The region of the profile, where the environment names none."""
        region = self._provider.config.get("region")
        is_given = any(os.environ.get(name) for name in _REGIONS)
        return {} if is_given or region is None else {"region": region}

    def __call__(self) -> Any:
        return self._provider()

    def __reduce__(self) -> NoReturn:
        raise TypeError("credentials are not pickled")

    @functools.cached_property
    def _provider(self) -> Boto3CredentialProvider:
        from botocore.exceptions import BotoCoreError, ClientError, ProfileNotFound
        from obstore.auth.boto3 import Boto3CredentialProvider

        from mstore.terms.errors import Unavailable

        named = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
        option = f"--profile {shlex.quote(named)}"
        hint = f"aws sso login {option}, or aws configure {option}"
        try:
            provider = Boto3CredentialProvider(ttl=_KEPT)
            # Roles and SSO ask a server for them.
            provider()
            return provider
        except ProfileNotFound:
            failure = Unavailable("AWS has no such profile", where=named, hint=hint)
        except ValueError:
            failure = Unavailable(
                "no credentials of AWS were found: not in the environment, not in the profile, and "
                "the machine has no role",
                where=named,
                hint=f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or {hint}",
            )
        except (BotoCoreError, ClientError) as error:
            # Its text may quote what a program printed, or a server answered.
            what = f"the credentials of the profile cannot be used ({type(error).__name__})"
            failure = Unavailable(what, where=named, hint=hint)
        raise failure
