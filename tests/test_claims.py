"""Let runs of one store want the same steps: each is computed once, nobody waits for ever, the dead are followed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import small
from orchestrators import QUICK, Orchestrator
from outer import results

from flows.iteration import star
from storage import layout, lease
from storage.claim import Claimed, Claims, read_claim
from storage.errors import CommitUnknownError, FencedError, StoreError
from storage.lease import Lease
from storage.local import LocalBackend
from storage.store import Store, open_store
from tasks.run import create_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Raw

pytestmark = pytest.mark.usefixtures("no_fsync")

Start = Any  # Callable[[str], Orchestrator]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PACE", QUICK)


@pytest.fixture
def store(store_url: str, tmp_path: Path) -> Store:
    return open_store(store_url, cache=tmp_path / "cache")


@pytest.fixture
def start(store: Store, tmp_path: Path) -> Iterator[Start]:
    made: list[Orchestrator] = []

    def begin(run_id: str, **options: Any) -> Orchestrator:
        made.append(Orchestrator(store.url, run_id, tmp_path / "cache", **options))
        assert made[-1].ask("take")["epoch"] == 1
        return made[-1]

    yield begin
    for one in made:
        one.kill()


class Flaky(LocalBackend):
    """A store that refuses to delete for a while, and stores what is new without an answer."""

    refuses = False
    refused = 0

    @contextmanager
    def down(self) -> Iterator[None]:
        self.refuses = True
        yield
        self.refuses = False

    def delete(self, key: str) -> None:
        if self.refuses:
            self.refused += 1
            raise StoreError("403")
        super().delete(key)

    def put_new(self, key: str, data: bytes) -> bool:
        created = super().put_new(key, data)
        if self.refuses and created:
            raise CommitUnknownError("503")
        return created


class Holder:
    """Hold a run in this process."""

    def __init__(self, store: Store, run_id: str) -> None:
        log = store.run_log(run_id)
        self.epoch = log.open()
        self.lease = Lease(store.backend, layout.lease(run_id, self.epoch))
        self.claims = Claims(store.backend, run_id, self.epoch)

    def __enter__(self) -> Claims:
        self.lease.start()
        return self.claims

    def __exit__(self, *_: object) -> None:
        self.claims.release()
        self.lease.release()


def test_who_wants_a_claimed_step_gets_none_and_waits(store: Store, start: Start) -> None:
    other = start("other")
    assert other.ask("claim", "b") == {"other": None}
    with Holder(store, "mine") as claims:
        found = claims.claim(["c", "a", "b"])
        assert found is not None
        assert (found.key, found.run_id, found.holder.pid) == ("b", "other", other.pid)
        assert [read_claim(store.backend, key) is None for key in "abc"] == [True, False, True]
        waiting = threading.Thread(target=claims.wait, args=(found,))
        waiting.start()
        waiting.join(QUICK.timeout_s * 1.5)
        assert waiting.is_alive(), "the other beats"
        other.ask("release")
        waiting.join(60)
        assert not waiting.is_alive()
        assert claims.claim(["c", "a", "b"]) is None


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_dead_claim_is_taken_away(store: Store, start: Start, elsewhere: bool) -> None:
    dead = start("dead", elsewhere=elsewhere)
    dead.ask("claim", "a")
    dead.kill()
    with Holder(store, "mine") as claims:
        found = claims.claim(["a"])
        assert found is not None
        started = time.monotonic()
        claims.wait(found)
        assert (time.monotonic() - started >= QUICK.timeout_s) is elsewhere
        assert claims.claim(["a"]) is None


def test_a_claim_of_the_same_run_before_it_was_taken_over_is_none(store: Store) -> None:
    with Holder(store, "mine") as before:
        assert before.claim(["a"]) is None
        with Holder(store, "mine") as after:
            assert after.claim(["a"]) is None
            claim = read_claim(store.backend, "a")
            assert claim is not None
            assert claim.epoch == 2
        assert read_claim(store.backend, "a") is None


def test_a_claim_that_its_own_holder_could_not_let_go_of_is_none(tmp_path: Path) -> None:
    """It beats by the lease of this very process, which lives: who waited for it would wait for itself."""
    store = open_store(str(tmp_path / "store"))
    store.backend = flaky = Flaky(store.url)
    with Holder(store, "mine") as claims:
        assert claims.claim(["a"]) is None
        with flaky.down():
            claims.release()
        assert read_claim(flaky, "a") is not None
        assert claims.claim(["a"]) is None
    assert read_claim(flaky, "a") is None


def test_a_silent_store_ends_no_session_and_is_asked_once(tmp_path: Path) -> None:
    """A claim is advisory: what can't be claimed is computed all the same, and each call may take minutes."""
    store = open_store(str(tmp_path / "store"))
    store.backend = flaky = Flaky(store.url)
    with Holder(store, "mine") as claims:
        assert claims.claim(["a", "b", "c"]) is None
        claims.done("a")
        claims.done("b")
        with flaky.down():
            claims.follow("d")
            claims.release()
            assert flaky.refused == 1
        claims.follow("e")
        assert [key for key in "abcde" if read_claim(flaky, key) is not None] == ["e"]


def test_a_session_goes_on_that_cannot_let_go(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    store.backend = flaky = Flaky(store.url)
    with Holder(store, "mine") as claims:
        assert claims.claim(["a", "b"]) is None
        claims.done("a")
        with flaky.down():
            claims.follow("b")
        assert flaky.refused == 1
        assert read_claim(flaky, "a") is not None
        claims.follow("b")
        assert read_claim(flaky, "a") is None


def test_who_waits_lets_go_of_what_the_store_kept(tmp_path: Path) -> None:
    """Else two who wait for each other's leftovers would wait for ever, since both beat."""
    store = open_store(str(tmp_path / "store"))
    store.backend = flaky = Flaky(store.url)
    with Holder(store, "one") as one, Holder(store, "two") as two:
        assert one.claim(["a"]) is None
        assert two.claim(["b"]) is None
        with flaky.down():
            one.release()
            two.release()
            first, second = one.claim(["b"]), two.claim(["a"])
        assert first is not None
        assert second is not None

        def go_on(claims: Claims, other: Claimed) -> None:
            claims.wait(other)
            assert claims.claim([other.key]) is None

        waiting = [
            threading.Thread(target=go_on, args=(one, first), daemon=True),
            threading.Thread(target=go_on, args=(two, second), daemon=True),
        ]
        for each in waiting:
            each.start()
        for each in waiting:
            each.join(30)
        assert not any(each.is_alive() for each in waiting)


def test_two_who_are_no_runs_take_nothing_from_each_other(tmp_path: Path) -> None:
    """Two collectors have the same name and epoch, and a lease each."""
    backend = open_store(str(tmp_path / "store")).backend
    first = Claims(backend, "gc", 0, layout.collector("1"))
    second = Claims(backend, "gc", 0, layout.collector("2"))
    assert first.claim(["a"]) is None
    other = second.claim(["a"])
    assert other is not None
    assert other.lease == layout.collector("1")


@pytest.mark.parametrize("damage", [b"", b"\x00garbage", b'{"run": "../../x", "epoch": 1}'])
def test_a_damaged_claim_claims_nothing(store: Store, raw: Raw, damage: bytes) -> None:
    raw.write(layout.claim("a"), damage)
    with Holder(store, "mine") as claims:
        assert claims.claim(["a"]) is None


def test_a_claim_of_a_session_is_kept_until_another_follows(store: Store) -> None:
    def claimed() -> str:
        return "".join(key for key in "abc" if read_claim(store.backend, key) is not None)

    with Holder(store, "mine") as claims:
        claims.claim(["a", "b"])
        claims.done("a")
        claims.done("b")
        assert claimed() == "ab", "the next step isn't known yet"
        claims.follow("c")
        assert claimed() == "c"
        claims.done("c")
        claims.release()
        assert claimed() == ""


def test_who_waits_holds_nothing(store: Store) -> None:
    with Holder(store, "one") as one, Holder(store, "two") as two:
        one.claim(["a"])
        two.claim(["b"])
        found = two.claim(["a"])
        assert found is not None
        assert read_claim(store.backend, "b") is None
        one.claim(["b"])
        with pytest.raises(AssertionError, match="holds none"):
            one.wait(found)


def test_runs_that_want_overlapping_steps_all_end(tmp_path: Path) -> None:
    """No deadlock, no step held twice at once; a rule that lets one wait while it holds stands still here."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    store = open_store(str(tmp_path / "store"))
    holding, twice = Counter[str](), []
    lock = threading.Lock()

    def work(number: int) -> int:
        chance = random.Random(seed + number)
        with Holder(store, f"run-{number}") as claims:
            for _ in range(8):
                wanted = chance.sample("abcd", chance.randint(2, 3))
                while (other := claims.claim(wanted)) is not None:
                    claims.wait(other)
                with lock:
                    holding.update(wanted)
                    twice.extend(key for key in wanted if holding[key] > 1)
                time.sleep(0.002)
                with lock:
                    holding.subtract(wanted)
                claims.release()
        return 1

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4), timeout=240)) == 4
    assert twice == []
    assert all(read_claim(store.backend, key) is None for key in "abcd")


def test_a_run_that_waits_stops_when_it_is_taken_over(tmp_path: Path) -> None:
    described = small.config(tmp_path)
    store, run = small.start(described)

    def heard(event: Any) -> None:
        if event["event"] == "waiting":
            store.run_log(run.run_id).open()  # as one who saw it stand still

    run._listen = heard
    with Holder(store, "other") as claims, run:
        assert claims.claim(["a"]) is None
        with pytest.raises(FencedError, match=f"run {run.run_id} was taken over"), run._alone(["a"]):
            pass


@pytest.mark.parametrize("runs", [2, 3])
def test_runs_at_once_in_one_store_compute_each_step_once(tmp_path: Path, runs: int) -> None:
    """One that comes later waits while a step is computed and reuses it then; all end with the same judge."""
    changes: dict[str, Any] = {"iterations": 1, "evaluate": {"base": False}}
    described = [small.config(tmp_path, work=str(tmp_path / f"work-{number}"), **changes) for number in range(runs)]
    store = open_store(described[0].store)
    names = [create_run(store, one) for one in described]
    computed, waited = Counter[str](), []
    together = threading.Barrier(runs)

    def heard(event: Any) -> None:
        if event["event"] == "step" and not event["reused"]:
            computed[event["key"]] += 1
        if event["event"] == "waiting":
            waited.append(event["message"])

    def go(number: int) -> str:
        _, run = small.start(described[number], run_id=names[number], listen=heard)
        together.wait()
        with run:
            judge = star(run)
            run.close("done")
        return judge.model.digest

    with ThreadPoolExecutor(runs) as pool:
        judges = list(pool.map(go, range(runs)))
    assert len(set(judges)) == 1
    assert waited, "they never met: nothing was tried"
    assert set(computed.values()) == {1}
    first = results(store, names[0])
    assert len(first) > 20
    for name in names[1:]:
        assert results(store, name) == first
    assert set(computed) == {key for key, _, _ in first.values()}
    assert all(read_claim(store.backend, key) is None for key in computed)
