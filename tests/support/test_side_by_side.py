import pytest

from tests.support.side_by_side import GROUPS, file_of


def test_all_files_with_shared_servers_are_in_a_group(request: pytest.FixtureRequest) -> None:
    """In another process each such file would start servers of its own. The files that pytest collected are checked."""
    shared = {"engine", "prefect_api"}
    files = {file_of(item) for item in request.session.items if shared & set(getattr(item, "fixturenames", ()))}
    assert files <= set(GROUPS)
