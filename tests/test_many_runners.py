"""Several processes at once: on a fresh workspace, and around one run."""

from children import start
from interrupted import arguments
from outages import PACING, points, records, rows, training

RUNNERS = 4


def test_runners_that_start_together_on_a_fresh_workspace_all_finish(tmp_path, isolated_workspace):
    command = [part for part in arguments("marl_baseline", "train.env_steps=100") if part != "--resume"]
    children = [start(tmp_path, *command) for _ in range(RUNNERS)]
    results = [child.data() for child in children]
    assert not [child.stderr for child in children if "Traceback" in child.stderr]
    assert len({result["run_dir"] for result in results}) == len(list(isolated_workspace.glob("runs/*"))) == RUNNERS
    for result in results:
        found, status = rows(isolated_workspace / "mlflow.db", result["run_name"])
        assert found == points(records(isolated_workspace / "runs" / result["run_name"]))
        assert status == result["status"] == "FINISHED"


def test_a_run_that_is_alive_belongs_to_its_process(tmp_path, migrated_workspace):
    with training(tmp_path, migrated_workspace) as run:
        name, owner = run.run_dir.name, run.record["owner"]
        lookers = [start(tmp_path, *verb) for verb in (("ls",), ("ls",), ("doctor",), ("sync",), ("ls",))]
        for reference in (name, "latest"):
            child = start(tmp_path, "resume", reference)
            assert child.wait() == 2
            assert name in child.stderr
            assert f"process {owner['pid']} on {owner['host']} is training it" in child.stderr
        assert [child.wait() for child in lookers] == [0] * len(lookers)
        assert (run.record["status"], run.record["owner"]) == ("RUNNING", owner)
        assert not [record for record in records(run.run_dir) if "status" in record]
        run.goes_on()
        run.child.kill()

    heartbeat = run.record["heartbeat"]
    run.hurry()
    lookers = [start(tmp_path, "ls") for _ in range(3)]
    claims = [start(tmp_path, "resume", name, "--json", "--plugin", str(PACING)) for _ in range(2)]
    assert sorted(child.wait() for child in claims) == [0, 2], [child.stderr for child in claims]
    assert [child.wait() for child in lookers] == [0] * len(lookers)
    ends = [(record["status"], record["t"]) for record in records(run.run_dir) if "status" in record]
    assert ends[:-1] == [("KILLED", int(heartbeat * 1e3)), ("RUNNING", ends[1][1])]
    found, status = rows(migrated_workspace / "mlflow.db", name)
    assert found == points(records(run.run_dir))
    assert run.record["status"] == ends[-1][0] == status == "FINISHED"
