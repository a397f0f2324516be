use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use quintlet_testkit::pods::{RuntimeBuilder, at, pod_json, status_json, time};
use serde_json::{Value, json};

use super::*;
use crate::actions::{ActionInput, compute_pod_actions};
use crate::conditions;
use crate::probes::ProbeResults;
use crate::sandbox::sandbox_decision;

fn status(list: Value, init: Value) -> PodStatus {
    let fill = |l: Value| {
        l.as_array()
            .unwrap()
            .iter()
            .map(|s| {
                let mut all = json!({"image": "", "imageID": "", "ready": false, "restartCount": 0});
                all.as_object_mut().unwrap().extend(s.as_object().unwrap().clone());
                all
            })
            .collect::<Vec<_>>()
    };
    status_json(json!({"phase": "Pending", "startTime": "2026-01-01T00:00:00Z",
        "containerStatuses": fill(list), "initContainerStatuses": fill(init)}))
}

fn pod() -> Pod {
    pod_json(json!({"containers": [{"name": "c", "image": "i"}],
        "initContainers": [{"name": "n", "image": "i"}, {"name": "s", "image": "i", "restartPolicy": "Always"}]}))
}

fn hold(seconds: u64, delay: u64) -> StartBackoff {
    StartBackoff { remaining: Duration::from_secs(seconds), delay: Duration::from_secs(delay) }
}

#[test]
fn the_first_thing_in_the_way_is_named() {
    let waits = |reason: &str| json!({"waiting": {"reason": reason, "message": "m"}});
    let done = json!({"name": "n", "ready": true, "state": {"terminated": {"exitCode": 0}}});
    let sidecar = json!({"name": "s", "ready": true, "started": true, "state": {"running": {}}});
    let runs = |started: bool, ready: bool| json!({"name": "c", "started": started, "ready": ready, "state": {"running": {"startedAt": "2026-01-01T00:00:07Z"}}});
    let c = |state: Value| json!([{"name": "c", "state": state}]);
    let fresh = || c(waits("PodInitializing"));
    let inits = || json!([done, sidecar]);
    for (name, regular, init, want) in [
        (
            "init fails",
            fresh(),
            json!([{"name": "n", "state": waits("ErrImagePull")}]),
            Some(("ErrImagePull", "n")),
        ),
        (
            "init runs",
            fresh(),
            json!([{"name": "n", "started": true, "ready": true, "state": {"terminated": {"exitCode": 0}}}, {"name": "s", "started": false, "state": {"running": {}}}]),
            Some(("StartupProbe", "s")),
        ),
        (
            "init ended badly",
            fresh(),
            json!([{"name": "n", "state": {"terminated": {"exitCode": 1}}}]),
            Some(("PodInitializing", "n")),
        ),
        (
            "plain init runs",
            fresh(),
            json!([{"name": "n", "started": true, "state": {"running": {}}}]),
            Some(("PodInitializing", "n")),
        ),
        (
            "sidecar not ready",
            json!([runs(true, true)]),
            json!([done, {"name": "s", "started": true, "state": {"running": {}}}]),
            Some(("ReadinessProbe", "s")),
        ),
        ("not tried yet", fresh(), inits(), Some(("ContainerCreating", "c"))),
        ("no image", c(waits("ImagePullBackOff")), inits(), Some(("ImagePullBackOff", "c"))),
        ("startup", json!([runs(false, false)]), inits(), Some(("StartupProbe", "c"))),
        ("readiness", json!([runs(true, false)]), inits(), Some(("ReadinessProbe", "c"))),
        ("ready", json!([runs(true, true)]), inits(), None),
        ("ended", c(json!({"terminated": {"exitCode": 0}})), inits(), None),
    ] {
        let got = from_status(&pod(), &status(regular, init), &StartBackoffs::new(), at(9));
        let short = got.as_ref().map(|w| (w.what.reason(), w.what.container().unwrap()));
        assert_eq!(short, want, "{name}");
    }
    let got = from_status(&pod(), &status(json!([runs(true, false)]), inits()), &StartBackoffs::new(), at(9))
        .unwrap();
    assert_eq!((got.since, got.until), (Some(at(7)), None));
    let mut ended = status(fresh(), inits());
    ended.phase = Some("Failed".into());
    assert_eq!(from_status(&pod(), &ended, &StartBackoffs::new(), at(9)), None);
}

#[test]
fn a_wait_for_a_back_off_has_an_end() {
    let p = pod_json(json!({"containers": [{"name": "c", "image": "i"}]}));
    let s = status(
        json!([{"name": "c", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "m"}},
            "lastState": {"terminated": {"exitCode": 3, "finishedAt": "2026-01-01T00:00:05Z"}}}]),
        json!([]),
    );
    let start_backoffs = StartBackoffs::from([("c".to_owned(), hold(36, 40))]);
    let got = from_status(&p, &s, &start_backoffs, at(9)).unwrap();
    assert_eq!(got.what.reason(), "CrashLoopBackOff");
    assert_eq!(got.what.message(), "restart after exit 3, back-off 40s");
    assert_eq!((got.since, got.until), (Some(at(5)), Some(at(45))));
}

#[test]
fn readiness_gates_come_last() {
    let p = pod_json(json!({"containers": [], "readinessGates": [{"conditionType": "x/y"}]}));
    let got = from_status(&p, &status(json!([]), json!([])), &StartBackoffs::new(), at(0)).unwrap();
    assert_eq!(got.what, Waiting::ReadinessGates { gates: vec!["x/y".into()] });
}

#[test]
fn a_resize_that_waits_is_named_when_nothing_else_is_in_the_way() {
    let p = pod_json(json!({"containers": []}));
    for (reason, want) in [("Deferred", "ResizeDeferred"), ("Infeasible", "ResizeInfeasible")] {
        let mut status = status(json!([]), json!([]));
        let mut pending = conditions::condition(conditions::RESIZE_PENDING, true, reason, "no room");
        pending.last_transition_time = Some(time(7));
        status.conditions = Some(vec![pending]);
        let got = from_status(&p, &status, &StartBackoffs::new(), at(9)).unwrap();
        assert_eq!((got.what.reason(), got.what.message().as_str()), (want, "no room"));
        assert_eq!((got.since, got.until, got.what.container()), (Some(at(7)), None, None));
        let gated = pod_json(json!({"containers": [], "readinessGates": [{"conditionType": "x/y"}]}));
        let got = from_status(&gated, &status, &StartBackoffs::new(), at(9)).unwrap();
        assert_eq!(got.what.reason(), "ReadinessGates", "the pod comes first");
    }
}

#[test]
fn every_start_failure_reads_back() {
    for failure in StartFailure::ALL {
        assert_eq!(StartFailure::parse(failure.as_str()), Some(failure));
    }
    assert_eq!(StartFailure::parse("ContainerCreating"), None);
}

#[test]
fn explain_lists_the_actions_of_a_sync() {
    let explained = |p: &Pod, r: RuntimeBuilder, start_backoffs: &StartBackoffs| {
        let runtime = r.build();
        let probes = ProbeResults::default();
        let input =
            ActionInput { pod: p, runtime: &runtime, probes: &probes, actuated: None, restart_all: false };
        explain(p, &compute_pod_actions(&input), &sandbox_decision(p, &runtime), start_backoffs)
    };
    let p = pod_json(json!({"containers": [{"name": "c", "image": "i"}]}));
    let none = StartBackoffs::new();
    assert_eq!(
        explained(&p, RuntimeBuilder::none(), &none),
        ["create sandbox, attempt 0: none exists", "start c"]
    );
    assert_eq!(explained(&p, RuntimeBuilder::ready().running("c"), &none), ["no change needed"]);
    let start_backoffs = StartBackoffs::from([(
        "c".to_owned(),
        StartBackoff { remaining: Duration::from_millis(35_800), delay: Duration::from_secs(40) },
    )]);
    assert_eq!(explained(&p, RuntimeBuilder::ready().exited("c", 3), &start_backoffs), ["start c at +35.8s"]);
    assert_eq!(
        explained(&p, RuntimeBuilder::ready().running("c").edit(|c| c.annotations.clear()), &none),
        ["kill c: Container c definition changed, will be restarted", "start c"]
    );
    let never = pod_json(json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}));
    assert_eq!(
        explained(&never, RuntimeBuilder::ready().exited("c", 0), &none),
        ["stop the pod: no container will run again"]
    );
    assert_eq!(explained(&pod(), RuntimeBuilder::ready(), &none), ["start init n"]);
}

#[test]
fn a_declined_write_is_named_with_the_api_servers_answer() {
    let declined = Some("invalid: ValidatingAdmissionPolicy 'freeze' denied request".to_owned());
    let cases = [
        (Waiting::StatusWrite { declined: None }, "the API server does not have the last status yet"),
        (
            Waiting::StatusWrite { declined: declined.clone() },
            "the API server does not have the last status yet: invalid: ValidatingAdmissionPolicy 'freeze' denied request",
        ),
        (Waiting::FinalDelete { declined: None }, "the API server has not deleted the object yet"),
        (
            Waiting::FinalDelete { declined },
            "the API server has not deleted the object yet: invalid: ValidatingAdmissionPolicy 'freeze' denied request",
        ),
    ];
    for (waiting, want) in cases {
        assert_eq!(waiting.message(), want);
    }
}
