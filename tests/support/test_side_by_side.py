import pytest

from tests.support.side_by_side import GROUPS, file_of


@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_all_files_with_shared_servers_are_in_a_group(which: str, request: pytest.FixtureRequest) -> None:
    """A process that runs such a file outside of the groups would start servers of its own."""
    shared = {"engine", "prefect_api"}
    files = {file_of(item) for item in request.session.items if shared & set(getattr(item, "fixturenames", ()))}
    assert files <= set(GROUPS)
