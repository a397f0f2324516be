use std::collections::BTreeMap;

use quintlet_model::ids::ContainerId;

use super::*;

fn pod_ref() -> PodRef {
    PodRef { uid: PodUid::parse("u1").unwrap(), namespace: "default".into(), name: "web".into() }
}

fn sandbox(id: &str, attempt: u32, state: SandboxState, ip: Option<&str>) -> Sandbox {
    Sandbox {
        id: SandboxId::parse(id).unwrap(),
        attempt,
        state,
        created_unix_ns: 1,
        ips: ip.map(|ip| ip.parse().unwrap()).into_iter().collect(),
        has_network: true,
        host_network: false,
        runtime_handler: String::new(),
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
    }
}

fn container(id: &str, state: ContainerState) -> Container {
    Container {
        id: ContainerId::parse(id).unwrap(),
        sandbox_id: SandboxId::parse("s").unwrap(),
        name: "main".to_owned(),
        attempt: 0,
        state,
        created_unix_ns: 1,
        started_unix_ns: 0,
        finished_unix_ns: 0,
        exit_code: 3,
        reason: String::new(),
        message: String::new(),
        image: "i".to_owned(),
        image_ref: "i".to_owned(),
        image_id: "i".to_owned(),
        log_path: String::new(),
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        mounts: Vec::new(),
        resources: None,
        user: None,
        stop_signal: String::new(),
    }
}

fn found(sandboxes: Vec<Sandbox>, containers: Vec<Container>) -> InspectedPod {
    InspectedPod { pod: Some(pod_ref()), sandboxes, containers }
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn entry() -> PodState {
    PodState::new(pod_ref().uid, None)
}

/// Applies the inspection with this ticket, made in the second of the same number.
fn apply(entry: &mut PodState, ticket: u64, found: Result<InspectedPod, String>) -> InspectionEffect {
    apply_listed(entry, ticket, None, found)
}

/// Applies an inspection that the second list of `listed` caused.
fn apply_listed(
    entry: &mut PodState,
    ticket: u64,
    listed: Option<u64>,
    found: Result<InspectedPod, String>,
) -> InspectionEffect {
    let (began, ended) = (at(ticket), at(ticket));
    entry.apply(Inspection { ticket, began, ended, pod: None, listed: listed.map(at), found })
}

#[test]
fn every_row_of_the_kubelets_event_table() {
    use ChangeKind::{Changed, Died, Removed, Started};
    use ContainerState as S;
    let record = |state: Option<S>| {
        state.map(|s| {
            let mut pod = PodRuntime::empty(pod_ref(), Cursor::default(), at(0));
            pod.containers = vec![container("c", s)];
            pod
        })
    };
    let rows: [(Option<S>, Option<S>, &[ChangeKind]); 20] = [
        (None, None, &[]),
        (None, Some(S::Running), &[Started]),
        (None, Some(S::Exited), &[Died]),
        (None, Some(S::Created), &[Changed]),
        (None, Some(S::Unknown), &[Changed]),
        (Some(S::Created), Some(S::Created), &[]),
        (Some(S::Created), Some(S::Running), &[Started]),
        (Some(S::Created), Some(S::Exited), &[Died]),
        (Some(S::Created), Some(S::Unknown), &[Changed]),
        (Some(S::Created), None, &[Died, Removed]),
        (Some(S::Running), Some(S::Running), &[]),
        (Some(S::Running), Some(S::Exited), &[Died]),
        (Some(S::Running), Some(S::Unknown), &[Changed]),
        (Some(S::Running), None, &[Died, Removed]),
        (Some(S::Exited), Some(S::Exited), &[]),
        (Some(S::Exited), Some(S::Running), &[Started]),
        (Some(S::Exited), Some(S::Unknown), &[Changed]),
        (Some(S::Exited), None, &[Removed]),
        (Some(S::Unknown), Some(S::Running), &[Started]),
        (Some(S::Unknown), None, &[Died, Removed]),
    ];
    for (old, new, expected) in rows {
        let kinds: Vec<_> =
            changes(record(old).as_ref(), record(new).as_ref()).iter().map(|c| c.kind).collect();
        assert_eq!(kinds, expected, "{old:?} → {new:?}");
    }
}

#[test]
fn a_sandbox_makes_the_same_events_without_a_container_name() {
    let mut e = entry();
    apply(&mut e, 1, Ok(found(vec![sandbox("s", 0, SandboxState::Ready, None)], vec![])));
    let effect = apply(&mut e, 2, Ok(found(vec![sandbox("s", 0, SandboxState::NotReady, None)], vec![])));
    let died = Change { kind: ChangeKind::Died, id: "s".to_owned(), container: String::new(), exit_code: 0 };
    assert_eq!(effect, InspectionEffect::Changed(vec![died]));
}

#[test]
fn an_inspection_that_began_before_the_last_one_applied_is_dropped() {
    let mut e = entry();
    let running = || Ok(found(vec![], vec![container("c", ContainerState::Running)]));
    let exited = || Ok(found(vec![], vec![container("c", ContainerState::Exited)]));
    assert!(matches!(apply(&mut e, 5, exited()), InspectionEffect::Changed(_)));
    assert_eq!(apply(&mut e, 4, running()), InspectionEffect::Stale);
    assert_eq!(apply(&mut e, 5, Err("late".to_owned())), InspectionEffect::Stale);
    assert_eq!(e.record().unwrap().containers[0].state, ContainerState::Exited);
    assert_eq!(apply(&mut e, 6, exited()), InspectionEffect::Same);
    assert_eq!(e.record().unwrap().observed, at(6));
}

#[test]
fn a_failed_inspection_keeps_the_last_good_state_with_the_error() {
    let mut e = entry();
    apply(&mut e, 1, Ok(found(vec![], vec![container("c", ContainerState::Running)])));
    assert_eq!(apply(&mut e, 2, Err("no answer".to_owned())), InspectionEffect::Changed(vec![]));
    assert_eq!(apply(&mut e, 3, Err("no answer".to_owned())), InspectionEffect::Same, "reported once");
    let record = e.record().unwrap();
    assert_eq!(
        (record.error.as_deref(), record.containers.len(), record.observed),
        (Some("no answer"), 1, at(1))
    );
    let back = apply(&mut e, 4, Ok(found(vec![], vec![container("c", ContainerState::Running)])));
    assert_eq!(back, InspectionEffect::Changed(vec![]));
    assert_eq!(e.record().unwrap().error, None);
}

#[test]
fn a_failed_inspection_creates_a_record_only_for_a_pod_that_was_listed_after_its_removal() {
    let down = || Err("down".to_owned());
    let running = || Ok(found(vec![], vec![container("c", ContainerState::Running)]));
    let nothing = || Ok(found(vec![], vec![]));
    let mut e = entry();
    assert_eq!(apply(&mut e, 1, down()), InspectionEffect::Nothing, "no list has had the pod");
    assert_eq!(
        apply_listed(&mut e, 2, Some(1), down()),
        InspectionEffect::Changed(vec![]),
        "a list has had it"
    );
    assert_eq!(e.record().unwrap().error.as_deref(), Some("down"));
    assert!(matches!(apply(&mut e, 3, running()), InspectionEffect::Changed(_)));
    assert!(matches!(apply(&mut e, 4, nothing()), InspectionEffect::Gone(_)));
    for (ticket, listed) in [(5, None), (6, Some(3))] {
        assert_eq!(
            apply_listed(&mut e, ticket, listed, down()),
            InspectionEffect::Nothing,
            "listed {listed:?}"
        );
    }
    assert_eq!(apply(&mut e, 7, nothing()), InspectionEffect::Nothing, "the removal is reported once");
    assert_eq!(
        apply_listed(&mut e, 8, Some(8), down()),
        InspectionEffect::Changed(vec![]),
        "made again since"
    );
    let mut e = PodState::new(pod_ref().uid, Some(at(4)));
    assert_eq!(
        apply_listed(&mut e, 9, Some(3), down()),
        InspectionEffect::Nothing,
        "the owner before found it gone"
    );
}

#[test]
fn addresses_stay_with_a_stopped_sandbox_also_across_errors_until_a_newer_one_is_ready() {
    use SandboxState::{NotReady, Ready};
    let ips = |e: &PodState, id: &str| {
        let sandbox = e.record().unwrap().sandboxes.iter().find(|s| s.id.as_str() == id).cloned();
        sandbox.unwrap().ips.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let mut e = entry();
    apply(&mut e, 1, Ok(found(vec![sandbox("s0", 0, Ready, Some("10.0.0.1"))], vec![])));
    apply(&mut e, 2, Ok(found(vec![sandbox("s0", 0, NotReady, None)], vec![])));
    assert_eq!(ips(&e, "s0"), ["10.0.0.1"]);
    apply(&mut e, 3, Err("down".to_owned()));
    apply(&mut e, 4, Ok(found(vec![sandbox("s0", 0, NotReady, None)], vec![])));
    assert_eq!(ips(&e, "s0"), ["10.0.0.1"], "kept across an error");
    let both = vec![sandbox("s0", 0, NotReady, None), sandbox("s1", 1, NotReady, None)];
    apply(&mut e, 5, Ok(found(both, vec![])));
    assert_eq!((ips(&e, "s0"), ips(&e, "s1")), (vec!["10.0.0.1".to_owned()], vec![]), "its owner's alone");
    let both = vec![sandbox("s0", 0, NotReady, None), sandbox("s1", 1, Ready, None)];
    apply(&mut e, 6, Ok(found(both, vec![])));
    assert!(ips(&e, "s0").is_empty(), "a newer one is ready");
    apply(&mut e, 7, Ok(found(vec![sandbox("s2", 2, Ready, Some("10.0.0.2"))], vec![])));
    assert!(matches!(apply(&mut e, 8, Ok(found(vec![], vec![]))), InspectionEffect::Gone(_)));
    apply(&mut e, 9, Ok(found(vec![sandbox("s2", 2, NotReady, None)], vec![])));
    assert!(ips(&e, "s2").is_empty(), "the pod was gone");
}

#[test]
fn a_hinted_change_is_confirmed_once_the_cri_shows_it() {
    use HintKind::{Created, Deleted, Exited, Started};
    let record = |state| {
        let mut pod = PodRuntime::empty(pod_ref(), Cursor::default(), at(0));
        pod.containers = vec![container("c", state)];
        pod.sandboxes = vec![sandbox("s", 0, SandboxState::Ready, None)];
        pod
    };
    for (kind, id, state, shows) in [
        (Created, "c", ContainerState::Created, true),
        (Created, "new", ContainerState::Created, false),
        (Started, "c", ContainerState::Created, false),
        (Started, "c", ContainerState::Running, true),
        (Started, "c", ContainerState::Exited, true),
        (Started, "s", ContainerState::Created, true),
        (Exited, "c", ContainerState::Running, false),
        (Exited, "c", ContainerState::Exited, true),
        (Exited, "s", ContainerState::Exited, false),
        (Exited, "new", ContainerState::Running, false),
        (Deleted, "c", ContainerState::Exited, false),
        (Deleted, "gone", ContainerState::Exited, true),
    ] {
        assert_eq!(effect_shows(kind, id, Some(&record(state))), shows, "{kind:?} {id} {state:?}");
    }
    assert!(effect_shows(Deleted, "c", None));
    assert!(!effect_shows(Started, "c", None) && !effect_shows(Exited, "c", None));
}
