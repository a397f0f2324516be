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
    }
}

fn found(sandboxes: Vec<Sandbox>, containers: Vec<Container>) -> Found {
    Found { pod: Some(pod_ref()), sandboxes, containers }
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn entry() -> Entry {
    Entry::new(pod_ref().uid)
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
    e.apply(1, at(1), None, Ok(found(vec![sandbox("s", 0, SandboxState::Ready, None)], vec![])));
    let verdict =
        e.apply(2, at(2), None, Ok(found(vec![sandbox("s", 0, SandboxState::NotReady, None)], vec![])));
    let died = Change { kind: ChangeKind::Died, id: "s".to_owned(), container: String::new(), exit_code: 0 };
    assert_eq!(verdict, Verdict::Changed(vec![died]));
}

#[test]
fn an_inspection_that_began_before_the_last_one_applied_is_dropped() {
    let mut e = entry();
    let running = || Ok(found(vec![], vec![container("c", ContainerState::Running)]));
    let exited = || Ok(found(vec![], vec![container("c", ContainerState::Exited)]));
    assert!(matches!(e.apply(5, at(5), None, exited()), Verdict::Changed(_)));
    assert_eq!(e.apply(4, at(4), None, running()), Verdict::Stale);
    assert_eq!(e.apply(5, at(5), None, Err("late".to_owned())), Verdict::Stale);
    assert_eq!(e.record().unwrap().containers[0].state, ContainerState::Exited);
    assert_eq!(e.apply(6, at(6), None, exited()), Verdict::Same);
    assert_eq!(e.record().unwrap().observed, at(6));
}

#[test]
fn a_failed_inspection_keeps_the_last_good_state_with_the_error() {
    let mut e = entry();
    e.apply(1, at(1), None, Ok(found(vec![], vec![container("c", ContainerState::Running)])));
    assert_eq!(e.apply(2, at(2), None, Err("no answer".to_owned())), Verdict::Changed(vec![]));
    assert_eq!(e.apply(3, at(3), None, Err("no answer".to_owned())), Verdict::Same, "told once");
    let record = e.record().unwrap();
    assert_eq!(
        (record.error.as_deref(), record.containers.len(), record.observed),
        (Some("no answer"), 1, at(1))
    );
    let back = e.apply(4, at(4), None, Ok(found(vec![], vec![container("c", ContainerState::Running)])));
    assert_eq!(back, Verdict::Changed(vec![]));
    assert_eq!(e.record().unwrap().error, None);
}

#[test]
fn addresses_stay_with_a_stopped_sandbox_also_across_errors_until_a_newer_one_is_ready() {
    use SandboxState::{NotReady, Ready};
    let ips = |e: &Entry, id: &str| {
        let sandbox = e.record().unwrap().sandboxes.iter().find(|s| s.id.as_str() == id).cloned();
        sandbox.unwrap().ips.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let mut e = entry();
    e.apply(1, at(1), None, Ok(found(vec![sandbox("s0", 0, Ready, Some("10.0.0.1"))], vec![])));
    e.apply(2, at(2), None, Ok(found(vec![sandbox("s0", 0, NotReady, None)], vec![])));
    assert_eq!(ips(&e, "s0"), ["10.0.0.1"]);
    e.apply(3, at(3), None, Err("down".to_owned()));
    e.apply(4, at(4), None, Ok(found(vec![sandbox("s0", 0, NotReady, None)], vec![])));
    assert_eq!(ips(&e, "s0"), ["10.0.0.1"], "kept across an error");
    let both = vec![sandbox("s0", 0, NotReady, None), sandbox("s1", 1, NotReady, None)];
    e.apply(5, at(5), None, Ok(found(both, vec![])));
    assert_eq!((ips(&e, "s0"), ips(&e, "s1")), (vec!["10.0.0.1".to_owned()], vec![]), "its owner's alone");
    let both = vec![sandbox("s0", 0, NotReady, None), sandbox("s1", 1, Ready, None)];
    e.apply(6, at(6), None, Ok(found(both, vec![])));
    assert!(ips(&e, "s0").is_empty(), "a newer one is ready");
    e.apply(7, at(7), None, Ok(found(vec![sandbox("s2", 2, Ready, Some("10.0.0.2"))], vec![])));
    assert!(matches!(e.apply(8, at(8), None, Ok(found(vec![], vec![]))), Verdict::Gone(_)));
    e.apply(9, at(9), None, Ok(found(vec![sandbox("s2", 2, NotReady, None)], vec![])));
    assert!(ips(&e, "s2").is_empty(), "the pod was gone");
}

#[test]
fn what_a_hint_told_of_shows_when_it_shows() {
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
        (Exited, "gone", ContainerState::Running, true),
        (Deleted, "c", ContainerState::Exited, false),
        (Deleted, "gone", ContainerState::Exited, true),
    ] {
        assert_eq!(effect_shows(kind, id, Some(&record(state))), shows, "{kind:?} {id} {state:?}");
    }
    assert!(effect_shows(Exited, "c", None) && effect_shows(Deleted, "c", None));
    assert!(!effect_shows(Started, "c", None));
}
