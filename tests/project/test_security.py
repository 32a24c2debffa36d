"""The table of SECURITY.md: who may do what, and the tests that show each row."""

import ast
import json
import os
import re
import stat
import tempfile
from pathlib import Path

import pytest

from deployments.pools import describe_pools
from tests.conftest import ROOT

# By the first words of each row.
SHOWN_BY = {
    "write to a store, or give you an archive": [
        "flows/test_trust.py::test_no_command_executes_what_a_record_names",
        "flows/test_trust.py::test_an_archive_executes_nothing",
        "flows/test_trust.py::test_every_process_of_a_command_starts_without_the_current_folder",
        "project/test_security.py::test_a_flow_run_in_a_container_begins_in_an_empty_folder",
        "flows/test_trust.py::test_a_rank_in_a_store_imports_no_module_of_it",
        "flows/test_untracked.py::test_training_sends_nothing_and_imports_nothing_of_the_current_folder",
        "flows/test_pool.py::test_a_run_started_from_the_form_completes",
        "flows/test_planted.py::test_no_command_touches_what_decides_the_training_in_a_record",
        "flows/test_planted.py::test_no_command_touches_what_only_an_attempt_reads",
        "flows/test_planted.py::test_no_rank_reads_the_files_in_a_checkpoints_record_of_code",
        "holdfast/recipe/test_trust.py::test_a_setting_that_could_open_something_is_refused",
        "holdfast/recipe/test_trust.py::test_records_start_no_more_ranks_than_a_machine_bears",
        "holdfast/recipe/test_trust.py::test_only_a_module_that_declares_the_recipe_is_imported",
        "flows/test_trust.py::test_in_a_folder_of_a_store_nothing_is_trained",
        "flows/test_trust.py::test_an_audit_of_a_store_executes_nothing_and_goes_on",
        "flows/test_trust.py::test_a_configuration_that_is_not_the_fingerprints_is_refused_and_a_problem",
        "flows/test_pool.py::test_an_audit_of_a_store_executes_nothing_that_its_runs_name",
        "flows/test_audit.py::test_a_forgery_that_verifies_is_found",
        "holdfast/keeping/verification/test_hostile.py::test_hostile_payloads_are_refused",
        "holdfast/keeping/verification/test_hostile.py::test_links_out_of_the_run_are_refused",
        "holdfast/keeping/verification/test_hostile.py::test_pruning_a_link_deletes_nothing_behind_it",
        "holdfast/recipe/test_named.py::test_a_store_that_names_code_is_opened_only_where_that_is_allowed",
        "holdfast/store/test_local_store.py::test_deleting_a_local_folder_follows_no_links",
        "holdfast/extensions/pack/test_hostile.py::test_hostile_files_are_refused",
        "holdfast/journal/signature/test_signature.py::test_a_signature_verifies_for_nothing_else",
        "holdfast/attempt/test_line.py::test_what_is_not_signed_is_not_trusted_and_stays",
        "holdfast/extensions/receipt/test_forged.py::test_what_a_stranger_without_the_key_changes_is_refused",
        "holdfast/extensions/receipt/test_forged.py::test_a_run_that_was_changed_after_its_receipt_is_refused",
        "holdfast/extensions/report/test_page.py::test_texts_are_escaped_and_markup_is_not",
        "holdfast/keeping/verification/test_hostile_values.py::test_terminal_control_characters_are_escaped",
    ],
    "give you a checkpoint of another program": [
        "holdfast/extensions/importing/test_refused.py::test_what_does_not_fit_is_refused_with_a_hint",
        "holdfast/extensions/importing/test_refused.py::test_a_dcp_folder_with_code_in_it_is_refused_and_none_runs",
    ],
    "read a store": [
        "holdfast/config/test_config.py::test_a_store_url_with_credentials_is_refused_and_not_shown",
        "holdfast/training/test_built.py::test_secrets_are_left_out",
        "holdfast/journal/signature/test_keys.py::test_no_key_is_shown",
        "flows/test_local.py::test_up_and_down_can_be_repeated",
    ],
    "start a flow run, or use the server's secret otherwise": [
        "holdfast/recipe/test_permission.py::test_recipes_are_allowed_by_prefix_and_others_are_not_imported",
        "holdfast/recipe/test_permission.py::test_files_are_allowed_by_folder_without_a_way_out",
        "holdfast/recipe/test_permission.py::test_stores_are_allowed_by_prefix",
    ],
    "open a web page in your browser": [
        "flows/test_doors.py::test_without_the_secret_the_attack_succeeds",
        "flows/test_doors.py::test_a_page_can_do_nothing_with_the_temporary_server",
        "flows/test_doors.py::test_a_page_can_do_nothing_with_the_server_of_make_up",
    ],
    "log in on the same machine as another user": [
        "flows/test_doors.py::test_a_page_can_do_nothing_with_the_server_of_make_up",
        "project/test_state_folder.py::test_nobody_else_may_enter_the_state_folder",
        "project/test_state_folder.py::test_nobody_else_may_read_a_file_in_the_state_folder",
        "project/test_state_folder.py::test_another_users_state_folder_is_refused",
        "project/test_security.py::test_nobody_else_may_enter_a_scratch_folder",
    ],
    "send packets to a machine, and train no run with it": [
        "holdfast/rank/test_several_ranks.py::test_a_kill_reaches_every_rank_and_none_listens_for_others",
    ],
    "write to your project's folder, or a folder on Python's search path": [
        "flows/test_trust.py::test_a_reader_names_the_recipe",
        "flows/test_audit.py::test_every_commit_of_a_run_that_was_killed_is_identical",
    ],
}


def test_every_row_of_the_table_is_shown_by_tests() -> None:
    page = (ROOT / "SECURITY.md").read_text("utf-8")
    table = page.partition("| who may | can | can't |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^|]*[^|-]) \|", table, re.MULTILINE) == [*SHOWN_BY]


@pytest.mark.parametrize("test", sorted({each for tests in SHOWN_BY.values() for each in tests}))
def test_a_test_that_shows_a_row_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
    assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


def test_nobody_else_may_enter_a_scratch_folder() -> None:
    """Also under a mask that lets them into all others."""
    mask = os.umask(0)
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    finally:
        os.umask(mask)
    sources = [*(ROOT / "holdfast").rglob("*.py"), *(ROOT / "flows").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]
    makers = re.compile(r"gettempdir\(\)|mktemp\(|[\"']/tmp[/\"']")
    found = {str(each.relative_to(ROOT)) for each in sources if makers.search(each.read_text("utf-8"))}
    assert found == {"holdfast/data/workers.py", "holdfast/store/permission.py"}, "another way to the temporary folder"


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_a_flow_run_in_a_container_begins_in_an_empty_folder(kind: str) -> None:
    """Prefect searches a copy of this folder first while it imports a flow."""
    dockerfile = (ROOT / "infra" / "Dockerfile").read_text("utf-8")
    assert re.findall(r"^WORKDIR (.*)$", dockerfile, re.MULTILINE) == ["/scratch"]
    assert " PYTHONSAFEPATH=1 " in " ".join(dockerfile.split())
    assert not re.search(r"^(COPY|ADD) .*/scratch|> */scratch", dockerfile, re.MULTILINE)
    for template in describe_pools(kind).values():
        job = json.dumps(template)
        assert not re.search(r"workingDir|working_dir|/scratch|PYTHONSAFEPATH|PYTHONPATH", job)
        assert template["variables"]["properties"].get("volumes", {}).get("default", []) == []
