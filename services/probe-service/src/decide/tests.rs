use quintlet_model::probe::ProbeType::{Liveness, Readiness, Startup};

use super::*;
use crate::target::Handler;

const BORN: Duration = Duration::from_secs(1000);
const NOW: Duration = Duration::from_secs(1100);

fn id(id: &str) -> ContainerId {
    ContainerId::parse(id).unwrap()
}

fn probe(kind: ProbeType) -> Probe {
    Probe {
        kind,
        handler: Handler::Tcp { host: None, port: 80 },
        initial_delay: Duration::ZERO,
        period: Duration::from_secs(10),
        timeout: Duration::from_secs(1),
        success_threshold: 1,
        failure_threshold: 3,
    }
}

fn running(started: bool) -> View {
    View {
        container_id: Some(id("c1")),
        running: true,
        started_at: Some(Duration::from_secs(1050)),
        started,
        pod_ip: "10.0.0.1".into(),
    }
}

fn memory(counter: u64, result: Option<ProbeResult>) -> ProbeMemory {
    ProbeMemory {
        container_id: id("c1"),
        counter,
        result,
        last: ProbeResult::Unknown,
        run: 0,
        on_hold: false,
    }
}

#[test]
fn a_new_instance_gets_the_initial_value_of_its_probe() {
    let base = [
        (Readiness, ProbeResult::Failure),
        (Liveness, ProbeResult::Success),
        (Startup, ProbeResult::Unknown),
    ];
    for (kind, expected) in base {
        let adopted = select_memory(&probe(kind), &running(false), None, None, BORN).unwrap();
        assert_eq!(adopted, memory(0, Some(expected)), "{kind}");
    }
}

#[test]
fn an_instance_older_than_the_service_or_started_gets_none() {
    let old = |seconds| View { started_at: Some(Duration::from_secs(seconds)), ..running(false) };
    for (view, expected) in [
        (running(true), None),
        (old(989), None),
        (old(990), Some(ProbeResult::Failure)),
        (old(1050), Some(ProbeResult::Failure)),
        (View { running: false, ..old(500) }, Some(ProbeResult::Failure)),
    ] {
        let adopted = select_memory(&probe(Readiness), &view, None, None, BORN).unwrap();
        assert_eq!(adopted.result, expected, "{view:?}");
    }
}

#[test]
fn the_memory_with_the_higher_counter_is_kept_for_one_container_instance() {
    let success = Some(ProbeResult::Success);
    let other = ProbeMemory { container_id: id("c0"), ..memory(99, success) };
    let (low, high) = (memory(4, None), memory(5, success));
    let same = memory(4, success);
    let view = running(true);
    for (own, seed, expected) in [
        (Some(&low), Some(&high), &high),
        (Some(&high), Some(&low), &high),
        (Some(&low), Some(&same), &low),
        (None, Some(&low), &low),
        (Some(&low), None, &low),
        (Some(&other), Some(&low), &low),
        (Some(&low), Some(&other), &low),
    ] {
        assert_eq!(select_memory(&probe(Liveness), &view, own, seed, BORN).as_ref(), Some(expected));
    }
    // The memory of another container instance is ignored.
    let fresh = select_memory(&probe(Liveness), &running(false), Some(&other), Some(&other), BORN).unwrap();
    assert_eq!(fresh, memory(0, success));
    assert_eq!(select_memory(&probe(Liveness), &View::default(), Some(&low), None, BORN), None);
}

#[test]
fn a_probe_is_enabled_only_for_a_running_container_in_the_right_startup_state() {
    let known = memory(1, Some(ProbeResult::Success));
    let failed = memory(1, Some(ProbeResult::Failure));
    let held = ProbeMemory { on_hold: true, ..known.clone() };
    let stopped = |m: &ProbeMemory| {
        NextStep::Stopped(ProbeMemory {
            counter: m.counter + 1,
            result: Some(ProbeResult::Failure),
            ..m.clone()
        })
    };
    let gone = View { running: false, ..running(true) };
    let created = View { running: false, started_at: None, ..running(false) };
    let open = NextStep::Probe(id("c1"));
    let idle = NextStep::Idle;
    for (kind, view, remembered, expected) in [
        (Liveness, View::default(), Some(&known), idle(IdleReason::NoContainer)),
        (Liveness, running(true), None, idle(IdleReason::NoContainer)),
        (Liveness, running(true), Some(&held), idle(IdleReason::OnHold)),
        (Liveness, gone.clone(), Some(&held), idle(IdleReason::OnHold)),
        (Liveness, gone.clone(), Some(&known), stopped(&known)),
        (Readiness, gone.clone(), Some(&known), stopped(&known)),
        (Startup, gone.clone(), Some(&known), stopped(&known)),
        (Readiness, gone, Some(&failed), idle(IdleReason::Stopped)),
        (Liveness, created, Some(&known), idle(IdleReason::NoContainer)),
        (Startup, running(true), Some(&known), idle(IdleReason::StartupPassed)),
        (Startup, running(false), Some(&known), open.clone()),
        (Readiness, running(false), Some(&known), idle(IdleReason::NotStarted)),
        (Liveness, running(false), Some(&known), idle(IdleReason::NotStarted)),
        (Readiness, running(true), Some(&known), open.clone()),
        (
            Liveness,
            View { pod_ip: String::new(), ..running(true) },
            Some(&known),
            idle(IdleReason::NoAddress),
        ),
    ] {
        assert_eq!(
            next_step(&probe(kind), &view, remembered, NOW),
            expected,
            "{kind} {view:?} {remembered:?}"
        );
    }
    let exec = Handler::Exec { command: Vec::new(), grant: Vec::new() };
    let host = Handler::Tcp { host: Some("127.0.0.1".into()), port: 1 };
    for handler in [exec, host] {
        let probe = Probe { handler, ..probe(Liveness) };
        let view = View { pod_ip: String::new(), ..running(true) };
        assert_eq!(next_step(&probe, &view, Some(&known), NOW), open, "needs no address");
    }
}

#[test]
fn the_initial_delay_counts_from_the_start_of_the_container() {
    let probe = Probe { initial_delay: Duration::from_secs(60), ..probe(Liveness) };
    let known = memory(0, None);
    for (now, expected) in [
        (1050, NextStep::After(Duration::from_secs(60))),
        (1109, NextStep::After(Duration::from_secs(1))),
        (1110, NextStep::Probe(id("c1"))),
        // A start ahead of the clock is a start now.
        (1000, NextStep::After(Duration::from_secs(60))),
    ] {
        assert_eq!(
            next_step(&probe, &running(true), Some(&known), Duration::from_secs(now)),
            expected,
            "{now}"
        );
    }
}

/// Applies attempts (S, F, ?) and gives the results after each: S, F, U or - for none, with ! when on hold.
fn play(probe: &Probe, mut memory: ProbeMemory, attempts: &str) -> String {
    let mut seen = String::new();
    for attempt in attempts.chars() {
        let raw = match attempt {
            'S' => ProbeAttempt::Success,
            'F' => ProbeAttempt::Failure,
            _ => ProbeAttempt::Unknown,
        };
        if let Some(next) = evaluate(probe, &memory, raw) {
            assert_eq!(next.counter, memory.counter + 1);
            memory = next;
        }
        seen.push(match memory.result {
            Some(ProbeResult::Success) => 'S',
            Some(ProbeResult::Failure) => 'F',
            Some(ProbeResult::Unknown) => 'U',
            None => '-',
        });
        if memory.on_hold {
            assert_eq!(memory.run, 0, "a hold resets the run");
            seen.push('!');
        }
    }
    seen
}

#[test]
fn results_follow_the_thresholds() {
    let probe = |kind, success_threshold, failure_threshold| Probe {
        success_threshold,
        failure_threshold,
        ..probe(kind)
    };
    let ready = Some(ProbeResult::Failure);
    let live = Some(ProbeResult::Success);
    let start = Some(ProbeResult::Unknown);
    for (probe, initial, attempts, expected) in [
        (probe(Readiness, 1, 3), ready, "SFFSFFF", "SSSSSSF"),
        (probe(Readiness, 3, 1), ready, "SSSFSSS", "FFSFFFS"),
        (probe(Readiness, 1, 1), None, "?F?S", "-FFS"),
        (probe(Readiness, 2, 2), None, "SFSFSS", "-----S"),
        (probe(Liveness, 1, 3), live, "FF?F", "SSSF!"),
        (probe(Liveness, 1, 1), live, "SF", "SF!"),
        (probe(Startup, 1, 3), start, "FFS", "UUS!"),
        (probe(Startup, 1, 3), start, "FFF", "UUF!"),
    ] {
        let seen = play(&probe, memory(0, initial), attempts);
        assert_eq!(seen, expected, "{} {attempts}", probe.kind);
    }
}

#[test]
fn a_result_is_reported_once_when_its_threshold_is_reached() {
    let probe = Probe { success_threshold: 3, ..probe(Readiness) };
    let mut now = memory(0, Some(ProbeResult::Failure));
    let mut news = Vec::new();
    for _ in 0..6 {
        let next = evaluate(&probe, &now, ProbeAttempt::Success).unwrap();
        news.push(is_changed(Some(&now), &next));
        now = next;
    }
    assert_eq!(news, [true, true, true, false, false, false]);
    assert_eq!((now.run, now.counter), (3, 6));
    assert!(is_changed(None, &now));
}

#[test]
fn the_first_probe_is_delayed_only_for_old_containers_without_memory() {
    let period = Duration::from_secs(10);
    let old = View { started_at: Some(Duration::from_secs(5)), ..running(true) };
    let soon = BORN + Duration::from_secs(1);
    for (view, handed_over, now, expected) in [
        (&old, false, soon, period / 2),
        (&old, true, soon, Duration::ZERO),
        (&old, false, BORN + period, Duration::ZERO),
        (&running(false), false, soon, Duration::ZERO),
    ] {
        assert_eq!(jitter(&probe(Liveness), view, handed_over, BORN, now, 0.5), expected);
    }
    assert!(jitter(&probe(Liveness), &old, false, BORN, soon, 7.0) <= period);
}
