"""A Postgres server for `make up POSTGRES=1`."""

import hashlib
import os
import pwd
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

from deployments.ledger import ProcessLedger, await_ready, launch_process
from holdfast.errors import ConfigError, RunStopped
from tasks.credentials import make_secret
from tasks.server import choose_port

POSTGRES_USER = "postgres"  # the user that Debian's package creates


def start_postgres(ledger: ProcessLedger) -> str:
    """Start a Postgres server on the loopback interface, unless it is running already. Return its database's URL."""
    programs = find_postgres()
    user, folder = choose_postgres_user(ledger.folder)
    password_file = folder.with_suffix(".password")
    if not password_file.exists():
        make_secret(password_file, secrets.token_hex(16))
        if user:
            shutil.chown(password_file, POSTGRES_USER)
        options = ["--pgdata", str(folder), "--username", "holdfast", "--auth", "scram-sha-256"]
        options += ["--encoding", "UTF8", "--no-locale"]  # the user's locale may have another encoding, or be missing
        made = subprocess.run(
            [str(programs / "initdb"), *options, "--pwfile", str(password_file)],
            capture_output=True, encoding="utf-8", errors="replace", check=False, cwd="/", **user,
        )  # fmt: skip
        if made.returncode:
            password_file.unlink()
            raise RunStopped(f"Postgres can't create its database (initdb failed): {made.stderr.strip()}")
    port = ledger.known.get("postgres", {}).get("port")
    if not ledger.is_alive("postgres"):
        port = choose_port(port)
        # Use no Unix socket, because the path of a socket may have only 107 bytes.
        options = ["-D", str(folder), "-h", "127.0.0.1", "-p", str(port), "-k", ""]
        launch_process(ledger, "postgres", [str(programs / "postgres"), *options], {}, user, port=port)
        await_ready("Postgres", lambda: _is_ready(programs, port), ledger, "postgres")
    return f"postgresql+asyncpg://holdfast:{password_file.read_text('utf-8')}@127.0.0.1:{port}/postgres"


def choose_postgres_user(state: Path) -> tuple[dict[str, Any], Path]:
    """Return a user to run Postgres, which refuses to run as root, and the data folder that this user owns."""
    if os.geteuid() != 0:
        return {}, state / "postgres"
    home = Path(pwd.getpwnam(POSTGRES_USER).pw_dir)
    name = f"holdfast-{hashlib.sha256(str(state).encode()).hexdigest()[:12]}"
    return {"user": POSTGRES_USER, "group": POSTGRES_USER, "extra_groups": []}, home / name


def find_postgres() -> Path:
    """Return the folder of Postgres' programs.

    Raises:
        ConfigError: Postgres is not installed.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[4]))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        raise ConfigError("make up POSTGRES=1 needs Postgres, which isn't installed", hint="apt-get install postgresql")
    return found[-1].parent if found else Path(str(on_path)).parent


def _is_ready(programs: Path, port: int) -> bool:
    ready = subprocess.run(
        [str(programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(port)], capture_output=True, check=False
    )
    return ready.returncode == 0
