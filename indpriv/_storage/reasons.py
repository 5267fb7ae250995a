"""What keeps us from object storage, from messages of the libraries of clouds."""

ASK_AGAIN = (  # in messages of the library of AWS, where asking again may help
    "NETWORK_CONNECTION",
    "SLOW_DOWN",
    "SERVICE_UNAVAILABLE",
    "INTERNAL_FAILURE",
    "REQUEST_TIMEOUT",
    "THROTTLING",
)
NO_RIGHT = (
    "these credentials have no right to do so in bucket {bucket}; ask its owner, or pass others "
    "by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or GOOGLE_APPLICATION_CREDENTIALS"
)
NO_BUCKET = "there is no bucket {bucket}; create it, or correct the address"
_UNREACHED = "the server does not answer; check the network and endpoint_override"
_REASONS = {  # by words of the libraries of AWS, Google and Azure, whose messages pyarrow passes on
    "ACCESS_DENIED": NO_RIGHT,
    "NO_SUCH_BUCKET": NO_BUCKET,
    "NETWORK_CONNECTION": _UNREACHED,
    "ExpiredToken": "the credentials have expired; renew them",
    "OAuth2 access token": "there are no credentials for bucket {bucket}; pass them by "
    "GOOGLE_APPLICATION_CREDENTIALS, or read a public bucket as gs://anonymous@BUCKET",
    "PERMISSION_DENIED": NO_RIGHT,
    "UNAUTHENTICATED": NO_RIGHT,
    "UNAVAILABLE": _UNREACHED,
    "AuthorizationFailure": NO_RIGHT,
    "AuthorizationPermissionMismatch": NO_RIGHT,
    "NoAuthenticationInformation": NO_RIGHT,
    "ContainerNotFound": NO_BUCKET,
    "Could not connect to server": _UNREACHED,
    "Could not resolve host": _UNREACHED,
}


def reason_of(error: OSError, bucket: str) -> str:
    """A reason with its remedy, or what the library said."""
    for word, reason in _REASONS.items():
        if word in str(error):
            return reason.format(bucket=bucket)
    return str(error)
