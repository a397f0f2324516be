use quintlet_proto::pleg::v1::{Lifecycle, LifecycleKind};
use quintlet_proto::podsync::v1::{PodView, SourceProblem};
use quintlet_proto::probe::v1::{Evaluation, Outcome, ProbeType};

use super::known::Known;
use super::lines::{lifecycle_line, probe_line, service_line};
use super::*;

const NOW: i64 = 1_800_000_000_112_000_000;
const MS: i64 = 1_000_000;

fn pod(uid: &str, status: &str) -> PodView {
    PodView {
        uid: uid.into(),
        name: uid.into(),
        namespace: "default".into(),
        ready: "0/1".into(),
        status: status.into(),
        version: 88,
        ..PodView::default()
    }
}

#[test]
fn only_changes_are_printed_and_a_reconnect_counts_the_changes_that_it_missed() {
    let mut known = Known::default();
    known.begin();
    assert_eq!(known.pod(&pod("a", "Pending"), NOW, None).len(), 1);
    assert_eq!(known.pod(&pod("b", "Running"), NOW, None).len(), 1);
    assert_eq!(known.end(NOW), (Vec::new(), 2));
    assert!(known.pod(&pod("a", "Pending"), NOW + 1, None).is_empty());
    known.begin();
    assert!(known.pod(&pod("a", "Pending"), NOW, None).is_empty());
    let (gone, changed) = known.end(NOW);
    assert_eq!((gone[0].subject.as_str(), gone[0].text.as_str(), changed), ("b", "gone", 1));
}

#[test]
fn a_status_has_the_time_since_its_event_and_a_write_the_time_since_the_status() {
    let mut known = Known::default();
    known.begin();
    let mut web = pod("web", "Pending");
    web.resource_version = "5".into();
    let printed = known.pod(&web, NOW, Some(NOW - MS));
    assert_eq!((printed.len(), printed[0].after), (1, None), "a snapshot follows from nothing: {printed:?}");
    let _ = known.end(NOW);
    web.status = "Running".into();
    let printed = known.pod(&web, NOW, Some(NOW - 2 * MS));
    assert_eq!((printed[0].place.as_str(), printed[0].after), ("v 88", Some(2 * MS)));
    web.resource_version = "6".into();
    let printed = known.pod(&web, NOW + 4 * MS, Some(NOW - 2 * MS));
    assert_eq!(printed.len(), 1);
    assert_eq!(
        (printed[0].source, printed[0].place.as_str(), printed[0].after),
        ("api", "rv 6", Some(4 * MS))
    );
    web.status = "Completed".into();
    let printed = known.pod(&web, NOW + 11_000 * MS, Some(NOW));
    assert_eq!(printed[0].after, None, "an event of long ago is not the reason");
}

#[test]
fn lines_of_all_sources_have_the_same_columns() {
    let died = Lifecycle {
        kind: LifecycleKind::Died.into(),
        uid: "u".into(),
        pod_name: "crasher".into(),
        pod_namespace: "default".into(),
        id: "c1".into(),
        container: "main".into(),
        exit_code: 3,
        at_unix_ns: NOW,
    };
    let evaluation = Evaluation {
        uid: "u".into(),
        pod_name: "web".into(),
        pod_namespace: "default".into(),
        container: "app".into(),
        r#type: ProbeType::Readiness.into(),
        outcome: Outcome::Success.into(),
        run: 12,
        seconds: 0.000_9,
        output: "ok".into(),
        at_unix_ns: NOW,
    };
    let status =
        Known::default().pod(&pod("crasher", "CrashLoopBackOff"), NOW, Some(NOW - 2_100_000)).remove(0);
    let back = "restarted: epoch 8, reachable after 38.0ms, 0 pods changed meanwhile";
    let lines = [
        lifecycle_line(&died, 7, 1182),
        status.clone(),
        Line { source: "api", text: "status written".into(), place: "rv 88123".into(), ..status },
        probe_line(&evaluation),
        Line { at: NOW, ..service_line("pleg-service", back.into()) },
    ];
    let text: String = lines.iter().map(render).collect();
    assert_eq!(
        text,
        "\
08:00:00.112 pleg   crasher          ContainerDied main exit=3        epoch 7 rev 1182
08:00:00.112 status crasher          0/1 CrashLoopBackOff             v 88  +2.1ms
08:00:00.112 api    crasher          status written                   rv 88123  +2.1ms
08:00:00.112 probe  web              readiness app success (streak 12)  900µs
08:00:00.112 ------ pleg-service restarted: epoch 8, reachable after 38.0ms, 0 pods changed meanwhile
"
    );
    let has = |pod: Option<&str>, quiet| {
        let args = WatchArgs { pod: pod.map(str::to_owned), quiet };
        let mut filter = Filter { args, succeeded: BTreeSet::new() };
        let _ = filter.matches(&lines[3]);
        lines.iter().map(|l| filter.matches(l)).collect::<Vec<_>>()
    };
    assert_eq!(has(None, true), [true, true, true, false, true]);
    assert_eq!(has(Some("web"), false), [false, false, false, true, true]);
}

#[test]
fn a_problem_is_printed_once_until_it_changes() {
    let mut known = Known::default();
    let problem = SourceProblem {
        source: "file".into(),
        origin: "/m/b.yaml".into(),
        field: "spec".into(),
        message: "required".into(),
        since_unix_ns: NOW,
    };
    let printed = known.problems(std::slice::from_ref(&problem), NOW);
    assert_eq!(
        (printed[0].subject.as_str(), printed[0].text.as_str()),
        ("b.yaml", "InvalidManifest  spec: required")
    );
    assert!(known.problems(std::slice::from_ref(&problem), NOW + 5).is_empty());
    assert!(known.problems(&[], NOW).is_empty());
    assert_eq!(known.problems(&[problem], NOW).len(), 1);
}
