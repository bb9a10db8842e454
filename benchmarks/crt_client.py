"""One transfer by the S3 client of the AWS CRT, as ``store.py`` has it done: WAY HOST PATH FILE.

It runs in a Python that has ``awscrt`` and nothing of ours; credentials are found as ever.
"""

import sys
from pathlib import Path

from awscrt.auth import AwsCredentialsProvider
from awscrt.http import HttpHeaders, HttpRequest
from awscrt.io import ClientBootstrap, DefaultHostResolver, EventLoopGroup
from awscrt.s3 import (
    S3Client,
    S3RequestTlsMode,
    S3RequestType,
    create_default_s3_signing_config,
)

REGION = "us-east-1"
PART_BYTES = {"up": 16 * 1024 * 1024, "down": 32 * 1024 * 1024}  # as ours
TARGET_GBPS = 10.0
TIMEOUT_S = 3600.0


def main(way: str, host: str, path: str, file: str) -> None:
    group = EventLoopGroup()
    bootstrap = ClientBootstrap(group, DefaultHostResolver(group))
    found = AwsCredentialsProvider.new_default_chain(bootstrap)
    client = S3Client(
        bootstrap=bootstrap,
        region=REGION,
        tls_mode=S3RequestTlsMode.DISABLED,
        part_size=PART_BYTES[way],
        throughput_target_gbps=TARGET_GBPS,
        signing_config=create_default_s3_signing_config(region=REGION, credential_provider=found),
    )
    headers = HttpHeaders([("host", host)])
    if way == "up":
        headers.add("content-length", str(Path(file).stat().st_size))
        request = HttpRequest("PUT", path, headers)
        done = client.make_request(type=S3RequestType.PUT_OBJECT, request=request, send_filepath=file)
    else:
        request = HttpRequest("GET", path, headers)
        done = client.make_request(type=S3RequestType.GET_OBJECT, request=request, recv_filepath=file)
    done.finished_future.result(TIMEOUT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
