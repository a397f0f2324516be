//! Services that are killed or stopped during work.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_simulation::{LONG, Options, Service, Sim, pods};
use quintlet_testapi::Failure;
use quintlet_testkit::fake_runtime::{Behaviour, ExecReply, Method, Rule, RuleId};
use quintlet_testkit::wait::until;
use serde_json::json;
use tonic::Code;

/// Duration of the preStop hook.
const HOOK: Duration = Duration::from_secs(3);

async fn in_the_middle_of_everything(service: Service, gently: bool) {
    let sim = Sim::start(Options::default()).await;
    let hooks = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&hooks);
    sim.runtime.on_exec(move |_, command| {
        let hook = command.first().is_some_and(|c| c == "hook");
        if hook {
            *counted.lock() += 1;
        }
        ExecReply { after: if hook { HOOK } else { Duration::ZERO }, ..ExecReply::default() }
    });
    sim.runtime.behave("c-crash", Behaviour { exit: Some((Duration::ZERO, 1)), ..Behaviour::default() });
    let mut running = pods::single("running");
    let probe = json!({"exec": {"command": ["probe"]}, "periodSeconds": 1});
    running["spec"]["containers"][0]["readinessProbe"] = probe.clone();
    running["spec"]["containers"][0]["startupProbe"] = probe;
    let mut ending = pods::single("ending");
    ending["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"exec": {"command": ["hook"]}}});
    let running_uid = sim.create(running);
    let ending_uid = sim.create(ending);
    let _uid = sim.create(pods::single("crash"));
    let before = sim.wait_ready("running").await;
    sim.wait_ready("ending").await;
    let crashed = sim
        .wait_pod("crash", "backing off for 10 s", |p| {
            let c = p.container("c-crash");
            c.reason == "CrashLoopBackOff" && c.message.contains("back-off 10s")
        })
        .await;
    let slow =
        sim.runtime.script(Rule::on(Method::RunPodSandbox).about("starting").latency(Duration::from_secs(1)));
    let starting_uid = sim.create(pods::single("starting"));
    sim.wait_calls(Method::RunPodSandbox, "starting", 1).await;
    sim.delete("ending", None);
    let ending_id = sim.runtime.newest(&ending_uid, "c-ending").unwrap().id().to_owned();
    sim.wait_calls(Method::ExecSync, &ending_id, 1).await;

    if gently {
        sim.stop(service).await;
        sim.up(service);
    } else {
        sim.restart(service).await;
    }

    sim.wait_ready("starting").await;
    sim.runtime.unscript(slow);
    sim.assert_started_once("starting", &starting_uid);
    sim.wait_gone("ending").await;
    assert_eq!(*hooks.lock(), 1, "the hook runs once");
    let stops = sim.runtime.calls_of(Method::StopContainer);
    let others: Vec<_> = stops.iter().filter(|c| !c.subjects.contains(&ending_id)).collect();
    assert!(others.is_empty(), "only the container of the deleted pod is stopped: {others:?}");
    sim.wait_pod("crash", "its third instance, with 20 s", |p| {
        let c = p.container("c-crash");
        c.restarts == crashed.container("c-crash").restarts + 1 && c.message.contains("back-off 20s")
    })
    .await;
    let after = sim.pod("running");
    assert_eq!(after.container("c-running"), before.container("c-running"));
    assert_eq!(after.0["status"]["conditions"], before.0["status"]["conditions"]);
    sim.assert_started_once("running", &running_uid);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_of_cri_proxy_at_any_time_affect_no_outcome() {
    in_the_middle_of_everything(Service::CriProxy, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_of_pleg_service_at_any_time_affect_no_outcome() {
    in_the_middle_of_everything(Service::Pleg, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_of_probe_service_at_any_time_affect_no_outcome() {
    in_the_middle_of_everything(Service::Probe, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_of_status_reporter_at_any_time_affect_no_outcome() {
    in_the_middle_of_everything(Service::Status, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_of_pod_sync_at_any_time_affect_no_outcome() {
    in_the_middle_of_everything(Service::PodSync, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stops_of_pod_sync_at_any_time_affect_no_outcome() {
    in_the_middle_of_everything(Service::PodSync, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_that_are_not_written_survive_the_end_of_pod_sync_and_status_reporter() {
    const POD_SYNC: &[Service] = &[Service::PodSync];
    const STATUS: &[Service] = &[Service::Status];
    const BOTH: &[Service] = &[Service::PodSync, Service::Status];
    let sim = Sim::start(Options::default()).await;
    let _uid = sim.create(pods::single("pulls-the-image"));
    sim.wait_ready("pulls-the-image").await;
    sim.wait_event("pulls-the-image", "Started", |e| e.reason == "Started").await;
    // In the last case, status-reporter ends while it has the same event of both processes.
    let cases = [[POD_SYNC; 2], [STATUS; 2], [BOTH; 2], [POD_SYNC, STATUS]];
    for (n, ends) in cases.into_iter().enumerate() {
        for gently in [false, true] {
            let name = format!("pod-{n}-{gently}");
            sim.api.faults().fail("create events", usize::MAX, Failure::Disconnect);
            let _uid = sim.create(pods::single(&name));
            sim.wait_ready(&name).await;
            for ending in ends {
                for service in ending {
                    if gently {
                        sim.stop(*service).await;
                    } else {
                        sim.kill(*service).await;
                    }
                }
                for service in ending {
                    sim.up(*service);
                }
                sim.wait_view(&name, "running", |v| v.ready == "1/1").await;
            }
            assert_eq!(sim.events(&name), []);
            sim.api.faults().clear();
            let expected = ["Pulled", "Created", "Started"].map(|reason| (reason.to_owned(), 1));
            until("the events of the start, once each", LONG, async || {
                let seen: Vec<_> = sim.events(&name).into_iter().map(|e| (e.reason, e.count)).collect();
                if seen == expected { Ok(()) } else { Err((name.clone(), seen)) }
            })
            .await;
        }
    }
    sim.finish().await;
}

/// Kills pod-sync, and cri-proxy if `cut`, during calls that hang. Lets the calls continue, and starts both.
async fn kill_during(sim: &Sim, hang: RuleId, cut: bool) {
    sim.kill(Service::PodSync).await;
    if cut {
        sim.kill(Service::CriProxy).await;
    }
    sim.runtime.unscript(hang);
    sim.up(Service::CriProxy);
    sim.up(Service::PodSync);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_that_pod_sync_was_killed_in_is_repeated_at_once_and_counts_once() {
    for cut in [false, true] {
        let sim = Sim::start(Options::default()).await;
        sim.runtime.behave("c-crash", Behaviour { exit: Some((Duration::ZERO, 1)), ..Behaviour::default() });
        let _uid = sim.create(pods::single("crash"));
        let first = sim.wait_pod("crash", "backing off for 10 s", |p| {
            let c = p.container("c-crash");
            c.reason == "CrashLoopBackOff" && c.message.contains("back-off 10s")
        });
        let restarts = first.await.container("c-crash").restarts;
        let made = sim.runtime.count(Method::CreateContainer);
        let hang = sim.runtime.hang(Method::CreateContainer);
        sim.runtime.wait_count(Method::CreateContainer, made + 1).await;
        kill_during(&sim, hang, cut).await;
        // A restart counted twice would wait 20 s more now, and 40 s after the next exit.
        sim.wait_pod("crash", "restarted, with 20 s", |p| {
            let c = p.container("c-crash");
            c.restarts == restarts + 1 && c.message.contains("back-off 20s")
        })
        .await;
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grace_period_continues_after_a_restart_of_pod_sync() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, _| ExecReply { after: Duration::from_secs(3600), ..ExecReply::default() });
    let mut pod = pods::single("ending");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(40);
    pod["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"exec": {"command": ["hook"]}}});
    let uid = sim.create(pod);
    sim.wait_ready("ending").await;
    let id = sim.runtime.newest(&uid, "c-ending").unwrap().id().to_owned();
    sim.delete("ending", None);
    sim.wait_calls(Method::ExecSync, &id, 1).await;
    sim.kill(Service::PodSync).await;
    // This time must be subtracted from the grace period.
    tokio::time::sleep(Duration::from_secs(2)).await;
    sim.up(Service::PodSync);
    sim.wait_gone("ending").await;
    let stops = sim.runtime.calls_of(Method::StopContainer);
    let timeouts: Vec<i64> =
        stops.iter().map(|c| c.request::<quintlet_cri_api::v1::StopContainerRequest>().timeout).collect();
    assert!(timeouts.iter().all(|t| *t <= 38), "the grace period was restarted: {timeouts:?}");
    assert_eq!(sim.runtime.count(Method::ExecSync), 1, "the hook runs once");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_pod_sync_starts_a_created_container_without_recreating_it() {
    for cut in [false, true] {
        let sim = Sim::start(Options::default()).await;
        let hang = sim.runtime.hang(Method::StartContainer);
        let uid = sim.create(pods::single("made"));
        sim.runtime.wait_count(Method::StartContainer, 1).await;
        kill_during(&sim, hang, cut).await;
        sim.wait_ready("made").await;
        sim.assert_started_once("made", &uid);
        assert_eq!(sim.runtime.count(Method::CreateContainer), 1, "cut {cut}");
        sim.finish().await;
    }
}

/// The instance is newer than the failure that the container still waits with.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_after_a_failure_is_not_repeated_by_the_next_pod_sync() {
    for (reason, failing) in
        [("ImagePullBackOff", Method::PullImage), ("CreateContainerError", Method::CreateContainer)]
    {
        let sim = Sim::start(Options::default()).await;
        let mut pod = pods::single("late");
        if failing == Method::PullImage {
            pod["spec"]["containers"][0]["image"] = json!("example.test/rare:1");
        }
        sim.runtime.script(Rule::on(failing).fail(Code::Unknown, "not now").times(1));
        let uid = sim.create(pod);
        sim.wait_pod("late", reason, |p| p.container("c-late").reason == reason).await;
        let before = sim.runtime.count(Method::CreateContainer);
        let hang = sim.runtime.hang(Method::CreateContainer);
        sim.runtime.wait_count(Method::CreateContainer, before + 1).await;
        kill_during(&sim, hang, false).await;
        let seen = sim.wait_ready("late").await;
        assert_eq!(seen.restarts(), 0, "{reason}");
        let of_pod = sim.runtime.containers().into_iter().filter(|c| c.pod_uid() == uid);
        assert_eq!(of_pod.count(), 1, "{reason}");
        sim.finish().await;
    }
}

/// The runtime keeps the refused instance in the state Created.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_whose_start_was_refused_is_not_started_again() {
    for restarts_pod_sync in [false, true] {
        let sim = Sim::start(Options::default()).await;
        sim.runtime.script(Rule::on(Method::StartContainer).fail(Code::Unknown, "no such device").times(1));
        let _uid = sim.create(pods::single("refused"));
        sim.wait_pod("refused", "refused", |p| p.container("c-refused").reason == "RunContainerError").await;
        sim.runtime.script(Rule::on(Method::CreateContainer).fail(Code::Unknown, "not now").times(1));
        if restarts_pod_sync {
            sim.restart(Service::PodSync).await;
        }
        sim.wait_pod("refused", "not created", |p| p.container("c-refused").reason == "CreateContainerError")
            .await;
        sim.wait_ready("refused").await;
        let starts = sim.runtime.calls_of(Method::StartContainer);
        assert_eq!(starts.len(), 2, "{starts:?}");
        assert_ne!(starts[0].subjects, starts[1].subjects);
        sim.finish().await;
    }
}

/// containerd cancels a start whose client is gone, which takes a while. The next start may find the
/// container still created.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_interrupted_by_a_kill_of_cri_proxy_is_no_failure_of_its_container() {
    let sim = Sim::start(Options::default()).await;
    let hang = sim.runtime.hang(Method::StartContainer);
    let uid = sim.create(pods::single("cut"));
    sim.wait_runtime("a start in flight", |r| r.in_flight(Method::StartContainer) == 1).await;
    let first = sim.runtime.newest(&uid, "c-cut").unwrap().id().to_owned();
    sim.kill(Service::CriProxy).await;
    sim.wait_runtime("no start in flight", |r| r.in_flight(Method::StartContainer) == 0).await;
    sim.up(Service::CriProxy);
    sim.wait_runtime("another start", |r| r.in_flight(Method::StartContainer) == 1).await;
    sim.runtime.end_unstarted(&first);
    sim.runtime.unscript(hang);
    sim.wait_ready("cut").await;
    assert_eq!(sim.calls_about(Method::StartContainer, &first), 2);
    let main = sim.pod("cut").container("c-cut");
    assert_eq!((main.restarts, main.kind.as_str()), (0, "running"));
    assert_ne!(sim.runtime.newest(&uid, "c-cut").unwrap().id(), first);
    assert_eq!(sim.warnings("cut"), [], "of a start that was made again");
    assert_eq!(sim.runtime.count(Method::CreateContainer), 2);
    sim.finish().await;
}

/// containerd completes a creation whose client is gone, with `/proc/0` for the namespaces of a sandbox that
/// it could not query.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_of_an_interrupted_creation_is_recreated_if_it_cannot_start() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.end_failed_starts(true);
    sim.runtime.finish_abandoned_calls(true);
    let slow = sim.runtime.hang(Method::CreateContainer);
    let uid = sim.create(pods::single("made"));
    sim.wait_runtime("a creation in flight", |r| r.in_flight(Method::CreateContainer) == 1).await;
    sim.kill(Service::CriProxy).await;
    sim.runtime.unscript(slow);
    sim.wait_runtime("the container", |r| r.newest(&uid, "c-made").is_some()).await;
    let first = sim.runtime.newest(&uid, "c-made").unwrap().id().to_owned();
    let text = "namespace path: lstat /proc/0/ns/ipc: no such file or directory";
    sim.runtime.fail(Method::StartContainer, tonic::Code::Unknown, text, 1);
    sim.up(Service::CriProxy);
    let made = sim.wait_ready("made").await.container("c-made");
    assert_eq!((made.restarts, made.kind.as_str()), (0, "running"));
    assert_eq!(sim.calls_about(Method::StartContainer, &first), 1, "existing containers are used first");
    assert_ne!(sim.runtime.newest(&uid, "c-made").unwrap().id(), first);
    assert_eq!(sim.warnings("made"), []);
    sim.finish().await;
}
