"""Pieces of lanes, seconds and shares by hand; and what the command says of folders without phases."""

import json
from dataclasses import asdict

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from rlpost.heartbeat import SPANS_SUFFIX, STEP, Span, file_name
from rlpost.tools.timeline import main
from rlpost.tools.timelines.lanes import Lane, Piece, Window, accounted, find_lanes, find_window, pieces, read_spans
from rlpost.tools.timelines.report import COLORS, as_markdown, draw

TEN_S = Window(steps={4: (100.0, 106.0), 5: (106.0, 110.0)})


def span(process, name, begin, end, doing="", step=None):
    return Span(process=process, name=name, doing=doing, step=step, begin=begin, end=end)


def shown(*spans):
    return [(p.name, p.begin, p.end, p.count) for p in pieces([span("x", *one) for one in spans], TEN_S)]


def step(number, begin, end):
    return span("driver", STEP[0], begin, end, STEP[1], number)


RUN = [
    span("driver", "publish", 90.0, 99.0, step=3),
    *(step(3, 90.0, 100.0), step(4, 100.0, 106.0), step(5, 106.0, 110.0)),
    *(span("driver", "generate", 100.0, 103.0, step=4), span("driver", "train", 103.0, 105.5, step=4)),
    *(span("driver", "generate", 106.0, 107.0, step=5), span("driver", "train", 107.0, 110.0, step=5)),
    *(span("rank 10", "train", 103.5, 105.0), span("rank 2", "train", 103.0, 104.0)),
    *(span("engine 77@b", "generate", 101.0, 103.0), span("engine 99@a", "generate", 100.5, 103.0)),
    span("engine 99@a", "generate", 106.0, 107.0),
    span("driver", "driver", 80.0, 111.0),
]


def write(run_dir, spans):
    folder = run_dir / "heartbeats"
    folder.mkdir(parents=True)
    for one in spans:
        with open(folder / f"{file_name(one.process)}{SPANS_SUFFIX}", "a") as file:
            file.write(json.dumps(asdict(one)) + "\n")
    return run_dir


def test_requests_that_overlap_are_counted_and_their_time_is_no_sum():
    requests = [("generate", 101.0, 104.0), ("generate", 102.0, 105.0), ("generate", 105.0, 106.0)]
    assert shown(*requests) == [
        ("generate", 101.0, 102.0, 1),
        ("generate", 102.0, 104.0, 2),
        ("generate", 104.0, 106.0, 1),
    ]
    assert Lane(name="x", pieces=pieces([span("x", *one) for one in requests], TEN_S)).seconds() == {"generate": 5.0}


def test_innermost_of_nested_phases_is_shown():
    assert shown(("train", 101.0, 105.0), ("save", 102.0, 103.0)) == [
        ("train", 101.0, 102.0, 1),
        ("save", 102.0, 103.0, 1),
        ("train", 103.0, 105.0, 1),
    ]


def test_short_phase_is_shown_though_requests_go_on_and_begin_meanwhile():
    requests = ("generate", 100.0, 104.0), ("generate", 102.5, 105.0)
    assert shown(*requests, ("publish", 102.0, 103.0)) == [
        ("generate", 100.0, 102.0, 1),
        ("publish", 102.0, 103.0, 1),
        ("generate", 103.0, 104.0, 2),
        ("generate", 104.0, 105.0, 1),
    ]


def test_phases_are_cut_off_at_the_window_and_gaps_stay():
    assert shown(("train", 90.0, 101.0), ("train", 103.0, 103.0), ("train", 108.0, 200.0), ("save", 110.0, 112.0)) == [
        ("train", 100.0, 101.0, 1),
        ("train", 108.0, 110.0, 1),
    ]


def test_lanes_are_in_order_and_pids_become_numbers():
    lanes = find_lanes(RUN, TEN_S, most=8)
    assert [lane.name for lane in lanes] == ["driver", "rank 2", "rank 10", "engine 0", "engine 1"]
    assert [lane.busy_s for lane in lanes] == [9.5, 1.0, 1.5, 3.5, 2.0]


def test_kind_of_many_processes_has_one_lane():
    *_, engines = find_lanes(RUN, TEN_S, most=1)
    assert (engines.name, engines.num_processes, engines.peak, engines.busy_s) == ("engine", 2, 2, 3.5)


def test_process_that_did_nothing_in_the_window_has_no_lane():
    only_step_5 = find_window(RUN, 5, None, 3)
    assert [lane.name for lane in find_lanes(RUN, only_step_5, most=8)] == ["driver", "engine 0"]


def test_time_between_phases_is_not_accounted_for():
    lanes = find_lanes(RUN, TEN_S, most=8)
    assert accounted(lanes, TEN_S) == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("first", "last", "steps"), [(None, None, [4, 5]), (4, None, [4]), (3, 5, [3, 4, 5]), (5, 5, [5])]
)
def test_window_holds_the_steps_asked_for(first, last, steps):
    assert list(find_window(RUN, first, last, 2).steps) == steps


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [(6, None, "step 6 did not run"), (2, 4, "step 2 did not run"), (5, 4, "--steps 5 4 is no range")],
)
def test_step_that_is_not_there_names_those_that_are(first, last, says):
    with pytest.raises(ValueError, match=f"{says}: there are steps 3 to 5"):
        find_window(RUN, first, last, 2)


def test_window_spans_its_steps():
    assert (TEN_S.begin, TEN_S.end, TEN_S.length_s) == (100.0, 110.0, 10.0)


def test_table_has_a_row_a_lane_and_a_column_a_phase():
    driver = [Piece(name="train", begin=100.0, end=104.0), Piece(name="own", begin=104.0, end=105.0)]
    engines = [Piece(name="generate", begin=100.0, end=107.5, count=30)]
    lanes = [Lane(name="driver", pieces=driver), Lane(name="engine", pieces=engines, num_processes=9)]
    text = as_markdown(lanes, TEN_S).splitlines()
    assert text[0] == "Steps 4 to 5: 10.000 s; seconds by phase:"
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in text[2:6] if "-" not in line] == [
        ["", "generate", "train", "own", "idle", "idle share"],
        ["driver", "", "4.000", "1.000", "5.000", "50%"],
        ["engine (9 processes)", "7.500", "", "", "2.500", "25%"],
    ]
    assert text[-1] == "Phases account for 50.0% of the driver's time."


def test_pieces_narrower_than_a_pixel_are_seen(tmp_path):
    calls = [Piece(name="reward", begin=at, end=at + 1e-6) for at in (101.0, 101.001, 108.0)]
    image = imread(draw([Lane(name="reward", pieces=calls)], TEN_S, tmp_path / "a.png"))[..., :3]
    like = abs(image - to_rgb(COLORS["reward"])).max(axis=-1) < 0.2
    *_, height = sorted(like.sum(axis=0))
    assert height > 20 and 2 <= (like.sum(axis=0) > height / 2).sum() < 100  # two lines, and the legend


def test_what_processes_wrote_is_read_without_a_torn_end(tmp_path):
    run = write(tmp_path, RUN)
    with open(run / "heartbeats" / f"rank_2{SPANS_SUFFIX}", "a") as file:
        file.write('{"process": "rank 2", "na')
    assert sorted(read_spans(run), key=str) == sorted(RUN, key=str)


def test_foreign_file_is_named(tmp_path):
    run = write(tmp_path, RUN)
    (run / "heartbeats" / f"other{SPANS_SUFFIX}").write_text('{"color": "red"}\n')
    with pytest.raises(ValueError, match=f"other{SPANS_SUFFIX}: not a file of phases"):
        read_spans(run)


def test_command_draws_and_prints(tmp_path, capsys):
    run = write(tmp_path / "run", RUN)
    out = tmp_path / "picture.png"
    assert main([str(run), "--steps", "4", "5", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "Phases account for 95.0% of the driver's time." in said and said.endswith(f"{out}\n")


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([], "no phases; a run with trainer.timeline=true writes them"),
        ([span("driver", "start", 1.0, 2.0)], "no step has ended yet"),
    ],
)
def test_run_without_steps_is_an_error(spans, says, tmp_path, capsys):
    assert main([str(write(tmp_path, spans))]) == 1
    assert says in capsys.readouterr().err


def test_missing_folder_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "no such folder" in capsys.readouterr().err
