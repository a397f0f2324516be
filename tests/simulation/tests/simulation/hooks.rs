//! Lifecycle hooks: failures, interruptions, and restarts of pod-sync.

use std::time::{Duration, Instant};

use quintlet_cri_api::v1;
use quintlet_proto::podsync::v1::Waiting;
use quintlet_simulation::{Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{ExecReply, Method, Rule};
use serde_json::{Value, json};

fn with_hook(name: &str, kind: &str, handler: Value) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["containers"][0]["lifecycle"] = json!({kind: handler});
    pod
}

fn exec(word: &str) -> Value {
    json!({"exec": {"command": [word]}})
}

fn execs(sim: &Sim, word: &str) -> usize {
    let calls = sim.runtime.calls_of(Method::ExecSync);
    calls.iter().filter(|c| c.request::<v1::ExecSyncRequest>().cmd == [word]).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_hook_is_reported_and_a_failed_post_start_stops_its_container() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, command| ExecReply {
        exit_code: i32::from(command[0].starts_with("bad")),
        stdout: b"out of order".to_vec(),
        ..ExecReply::default()
    });
    let uid = sim.create(with_hook("post", "postStart", exec("bad-post")));
    let want = format!(
        r#"Exec lifecycle hook ([bad-post]) for Container "c-post" in Pod "post_default({uid})" failed - error: command 'bad-post' exited with 1: , message: "out of order""#
    );
    sim.wait_pod("post", "PostStartHookError", |p| {
        let c = p.container("c-post");
        c.reason == "PostStartHookError" && c.message == want
    })
    .await;
    sim.wait_event("post", "FailedPostStartHook", |e| {
        e.kind == "Warning" && e.reason == "FailedPostStartHook" && e.message == "PostStartHook failed"
    })
    .await;
    sim.wait_event("post", "Killing", |e| e.reason == "Killing" && e.message == "FailedPostStartHook").await;
    let first = sim.runtime.containers().into_iter().find(|c| c.pod_uid() == uid).unwrap();
    assert_eq!(sim.calls_about(Method::StopContainer, first.id()), 1);
    // Its end is an exit like any other: once more without a wait, then the back-off has it.
    let seen = sim
        .wait_pod("post", "CrashLoopBackOff", |p| p.container("c-post").reason == "CrashLoopBackOff")
        .await;
    let want = format!("back-off 10s restarting failed container=c-post pod=post_default({uid})");
    assert_eq!(seen.container("c-post").message, want);

    let _uid = sim.create(with_hook("pre", "preStop", exec("bad-pre")));
    let _uid = sim.create(with_hook("nothing", "preStop", json!({"tcpSocket": {"port": 1}})));
    let _uid = sim.create(with_hook("fine", "preStop", exec("good")));
    for name in ["pre", "nothing", "fine"] {
        sim.wait_ready(name).await;
        sim.delete(name, None);
    }
    for name in ["pre", "nothing"] {
        sim.wait_event(name, "FailedPreStopHook", |e| {
            e.kind == "Warning" && e.reason == "FailedPreStopHook" && e.message == "PreStopHook failed"
        })
        .await;
    }
    for name in ["pre", "nothing", "fine"] {
        sim.wait_gone(name).await;
    }
    assert_eq!(sim.warnings("fine"), []);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_whose_post_start_hook_fails_is_stopped_after_its_pre_stop_hook() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, command| ExecReply {
        exit_code: i32::from(command[0] == "bad"),
        ..ExecReply::default()
    });
    let mut pod = with_hook("both", "postStart", exec("bad"));
    pod["spec"]["containers"][0]["lifecycle"]["preStop"] = exec("drain");
    let uid = sim.create(pod);
    let first = async || {
        sim.wait_runtime("a container", |r| r.containers().iter().any(|c| c.pod_uid() == uid)).await;
        sim.runtime.containers().into_iter().find(|c| c.pod_uid() == uid).unwrap().id().to_owned()
    };
    let first = first().await;
    sim.wait_calls(Method::StopContainer, &first, 1).await;
    let calls = sim.runtime.calls();
    let of_first: Vec<_> = calls
        .iter()
        .filter(|c| c.subjects.contains(&first))
        .filter(|c| matches!(c.method, Method::ExecSync | Method::StopContainer))
        .map(|c| match c.method {
            Method::ExecSync => c.request::<v1::ExecSyncRequest>().cmd.join(" "),
            _ => "stop".to_owned(),
        })
        .collect();
    assert_eq!(of_first, ["bad", "drain", "stop"]);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_whose_post_start_hook_failed_is_not_ready_while_it_stops() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, _| ExecReply { exit_code: 1, ..ExecReply::default() });
    let mut pod = with_hook("unready", "postStart", exec("bad"));
    pod["spec"]["containers"][0]["lifecycle"]["preStop"] = json!({"sleep": {"seconds": 25}});
    let _uid = sim.create(pod);
    sim.wait_event("unready", "FailedPostStartHook", |e| e.reason == "FailedPostStartHook").await;
    // The start is observed within seconds.
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(sim.runtime.count(Method::StopContainer), 0, "the sleep is not over");
    let seen = sim.pod("unready");
    assert_eq!((seen.container("c-unready").kind.as_str(), seen.is_ready()), ("waiting", false), "{seen:?}");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pre_stop_hook_with_a_broken_connection_neither_fails_nor_runs_again() {
    let sim = Sim::start(Options::default()).await;
    let _uid = sim.create(with_hook("cut", "preStop", exec("drain")));
    sim.wait_ready("cut").await;
    let rule = sim.runtime.script(Rule::on(Method::ExecSync).hang());
    sim.delete("cut", None);
    sim.runtime.wait_count(Method::ExecSync, 1).await;
    sim.kill(Service::CriProxy).await;
    sim.runtime.unscript(rule);
    sim.up(Service::CriProxy);
    sim.wait_gone("cut").await;
    assert_eq!(execs(&sim, "drain"), 1);
    assert_eq!(sim.warnings("cut"), [], "the outcome is unknown: no warning");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pre_stop_command_may_take_more_than_an_hour_of_its_grace_period() {
    const COMMAND: Duration = Duration::from_secs(3_700);
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("web");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(4_000);
    pod["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"exec": {"command": ["drain"]}}});
    let uid = sim.create(pod);
    sim.wait_ready("web").await;
    let id = sim.runtime.newest(&uid, "c-web").unwrap().id().to_owned();
    sim.runtime.script(Rule::on(Method::ExecSync).latency(COMMAND));
    let began = tokio::time::Instant::now();
    sim.delete("web", None);
    let ended = sim.runtime.wait(|runtime| runtime.container(&id).is_none_or(|c| !c.running()));
    tokio::time::timeout(2 * COMMAND, ended).await.expect("the container ends");
    assert!(began.elapsed() >= COMMAND, "it was stopped after {:?}", began.elapsed());
    sim.wait_gone("web").await;
    assert_eq!(sim.runtime.count(Method::ExecSync), 1);
    assert_eq!(sim.warnings("web"), []);
    sim.wait_nothing_left(&uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pre_stop_hook_in_progress_is_awaited_after_a_restart_of_pod_sync() {
    let sim = Sim::start(Options::default()).await;
    let _uid = sim.create(with_hook("held", "preStop", exec("drain")));
    sim.wait_ready("held").await;
    let rule = sim.runtime.script(Rule::on(Method::ExecSync).hang());
    sim.delete("held", None);
    sim.runtime.wait_count(Method::ExecSync, 1).await;
    sim.restart(Service::PodSync).await;
    // Once this pod runs, the new pod-sync has synced the other one long ago.
    let _uid = sim.create(pods::single("after"));
    sim.wait_ready("after").await;
    assert_eq!(sim.runtime.in_flight(Method::ExecSync), 1);
    assert_eq!(sim.runtime.count(Method::StopContainer), 0, "the container is stopped after its hook");
    sim.runtime.unscript(rule);
    sim.wait_gone("held").await;
    assert_eq!(execs(&sim, "drain"), 1, "the hook is joined, not run again");
    assert_eq!(sim.runtime.count(Method::StopContainer), 1);
    assert_eq!(sim.warnings("held"), []);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sleep_hook_continues_for_its_remaining_time_after_a_restart() {
    const SLEEP: Duration = Duration::from_secs(6);
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(with_hook("sleeps", "preStop", json!({"sleep": {"seconds": SLEEP.as_secs()}})));
    sim.wait_ready("sleeps").await;
    let deleted = Instant::now();
    sim.delete("sleeps", None);
    sim.wait_event("sleeps", "Killing", |e| e.reason == "Killing").await;
    let begun = Instant::now();
    tokio::time::sleep((SLEEP / 2).saturating_sub(begun - deleted)).await;
    sim.restart(Service::PodSync).await;
    let id = sim.runtime.newest(&uid, "c-sleeps").unwrap().id().to_owned();
    sim.wait_calls(Method::StopContainer, &id, 1).await;
    let whole = deleted.elapsed();
    assert!(whole >= SLEEP, "{whole:?}: the sleep is not cut short");
    assert!(whole < SLEEP + SLEEP / 2, "{whole:?}: the sleep is not restarted");
    let stop = sim.runtime.calls_of(Method::StopContainer).remove(0).request::<v1::StopContainerRequest>();
    // Each of the two rounds to whole seconds, never shortening the grace period.
    assert!((22..=26).contains(&stop.timeout), "the sleep is part of the grace of 30 s: {stop:?}");
    sim.wait_gone("sleeps").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_start_hook_that_was_pending_at_a_kill_of_pod_sync_runs() {
    let sim = Sim::start(Options::default()).await;
    let hung = sim.runtime.hang(Method::StartContainer);
    let uid = sim.create(with_hook("owed", "postStart", exec("first")));
    sim.runtime.wait_count(Method::StartContainer, 1).await;
    sim.kill(Service::PodSync).await;
    sim.runtime.unscript(hung);
    sim.wait_runtime("it runs", |r| r.newest(&uid, "c-owed").is_some_and(|c| c.running())).await;
    assert_eq!(execs(&sim, "first"), 0);
    sim.up(Service::PodSync);
    sim.runtime.wait_count(Method::ExecSync, 1).await;
    sim.wait_ready("owed").await;
    // The completed hook is recorded.
    sim.restart(Service::PodSync).await;
    let _uid = sim.create(pods::single("after"));
    sim.wait_ready("after").await;
    assert_eq!(execs(&sim, "first"), 1);
    sim.assert_started_once("owed", &uid);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_start_hook_that_fails_under_the_next_pod_sync_stops_its_container() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, _| ExecReply { exit_code: 1, stdout: b"no".to_vec(), ..ExecReply::default() });
    let hung = sim.runtime.script(Rule::on(Method::ExecSync).hang());
    let uid = sim.create(with_hook("fails", "postStart", exec("first")));
    sim.runtime.wait_count(Method::ExecSync, 1).await;
    sim.restart(Service::PodSync).await;
    sim.wait_view("fails", "the hook is waited for", |v| {
        v.waiting.as_ref().is_some_and(|w| w.reason == "PostStartHook")
    })
    .await;
    sim.runtime.unscript(hung);
    sim.wait_pod("fails", "PostStartHookError", |p| p.container("c-fails").reason == "PostStartHookError")
        .await;
    sim.wait_event("fails", "FailedPostStartHook", |e| e.reason == "FailedPostStartHook").await;
    let first = sim.runtime.containers().into_iter().find(|c| c.pod_uid() == uid).unwrap();
    assert_eq!(sim.calls_about(Method::StopContainer, first.id()), 1);
    assert_eq!(sim.calls_about(Method::ExecSync, first.id()), 1, "it is joined, not run again");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hook_with_much_output_that_fails_between_two_pod_syncs_fails_under_the_second() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, _| ExecReply {
        exit_code: 1,
        stdout: vec![b'o'; 1 << 20],
        stderr: vec![b'e'; 1 << 20],
        ..ExecReply::default()
    });
    let hung = sim.runtime.script(Rule::on(Method::ExecSync).hang());
    let uid = sim.create(with_hook("loud", "postStart", exec("first")));
    sim.runtime.wait_count(Method::ExecSync, 1).await;
    sim.kill(Service::PodSync).await;
    sim.runtime.unscript(hung);
    quintlet_testkit::wait::until("the hook ends", quintlet_simulation::LONG, async || {
        if sim.runtime.in_flight(Method::ExecSync) == 0 { Ok(()) } else { Err("it runs") }
    })
    .await;
    sim.up(Service::PodSync);
    let failed = |p: &quintlet_simulation::Seen| p.container("c-loud").reason == "PostStartHookError";
    let seen = sim.wait_pod("loud", "PostStartHookError", failed).await;
    let message = seen.container("c-loud").message;
    assert!(
        message.contains(&format!("exited with 1: {}, message: \"{}\"", "e".repeat(1024), "o".repeat(1024))),
        "{message}"
    );
    let first = sim.runtime.containers().into_iter().find(|c| c.pod_uid() == uid).unwrap();
    assert_eq!(sim.calls_about(Method::ExecSync, first.id()), 1, "its result is kept");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hooks_with_much_output_leave_room_for_the_calls_of_other_pods() {
    // Together they have more than the limit of pod-sync's socket, which is 96 MiB.
    const LOUD: usize = 8;
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, _| ExecReply { stdout: vec![b'o'; 15 << 20], ..ExecReply::default() });
    let hung = sim.runtime.script(Rule::on(Method::ExecSync).hang());
    for n in 0..LOUD {
        let _uid = sim.create(with_hook(&format!("loud-{n}"), "postStart", exec("loud")));
    }
    quintlet_testkit::wait::until("the hooks run", quintlet_simulation::LONG, async || {
        let running = sim.runtime.in_flight(Method::ExecSync);
        if running == LOUD { Ok(()) } else { Err(running) }
    })
    .await;
    sim.runtime.unscript(hung);
    for n in 0..LOUD {
        let name = format!("loud-{n}");
        assert_eq!(sim.wait_ready(&name).await.restarts(), 0, "{name}");
        assert_eq!(sim.warnings(&name), []);
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pre_stop_hook_of_a_recreated_container_runs_once_despite_kills() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(with_hook("changed", "preStop", exec("drain")));
    sim.wait_ready("changed").await;
    let first = sim.runtime.newest(&uid, "c-changed").unwrap().id().to_owned();
    let hung = sim.runtime.script(Rule::on(Method::ExecSync).hang());
    let image = |p: &mut Value| p["spec"]["containers"][0]["image"] = json!("example.test/app:2");
    sim.api.edit("pods", "default", "changed", image).unwrap();
    sim.runtime.wait_count(Method::ExecSync, 1).await;
    // Events are not recorded: one in flight would be lost with the process.
    sim.wait_event("changed", "reported", |e| e.reason == "Killing").await;
    sim.kill(Service::PodSync).await;
    // It ended before the new pod-sync could wait for it.
    sim.runtime.unscript(hung);
    quintlet_testkit::wait::until("the hook ends", quintlet_simulation::LONG, async || {
        if sim.runtime.in_flight(Method::ExecSync) == 0 { Ok(()) } else { Err("it runs") }
    })
    .await;
    assert_eq!(sim.runtime.count(Method::StopContainer), 0);
    sim.up(Service::PodSync);
    sim.wait_pod("changed", "recreated", |p| p.is_ready() && p.restarts() == 1).await;
    assert_eq!(execs(&sim, "drain"), 1);
    assert_eq!(sim.calls_about(Method::StopContainer, &first), 1);
    let killing = sim.events("changed").into_iter().filter(|e| e.reason == "Killing");
    assert_eq!(killing.map(|e| e.count).sum::<i64>(), 1);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_https_hook_with_a_plain_http_response_is_repeated_over_http_and_reported() {
    let sim = Sim::start(Options::default()).await;
    let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let answers = quintlet_kit::task::spawn("plain", async move {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        while let Ok((mut peer, _)) = server.accept().await {
            let _ = peer.read(&mut [0; 4096]).await;
            let _ = peer.write_all(b"HTTP/1.1 200 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
        }
    });
    let get = json!({"httpGet": {"host": "127.0.0.1", "port": port, "scheme": "HTTPS", "path": "/up"}});
    let _uid = sim.create(with_hook("plain", "postStart", get));
    sim.wait_ready("plain").await;
    let text = format!(
        "request to HTTPS lifecycle hook 127.0.0.1:{port} got HTTP response, retry with HTTP succeeded"
    );
    sim.wait_event("plain", "LifecycleHTTPFallback", |e| {
        e.kind == "Warning" && e.reason == "LifecycleHTTPFallback" && e.message == text
    })
    .await;
    let metrics = quintlet_telemetry::metrics::text();
    let counted = metrics.lines().find(|l| l.starts_with("kubelet_lifecycle_handler_http_fallbacks_total"));
    assert_eq!(counted, Some("kubelet_lifecycle_handler_http_fallbacks_total 1"), "{metrics}");
    answers.abort();
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pre_stop_hook_that_could_not_be_sent_runs_after_cri_proxy_restarts() {
    let sim = Sim::start(Options::default()).await;
    // A pod is Ready by the event of its start, maybe before pod-sync has observed it after its call. Then it
    // waits for pleg-service, which cannot observe it without cri-proxy.
    let is_met = |w: &Waiting| ["PreStopHook", "ServiceNotReachable"].contains(&w.reason.as_str());
    for attempt in 0..5 {
        let name = format!("away-{attempt}");
        let uid = sim.create(with_hook(&name, "preStop", exec("drain")));
        sim.wait_ready(&name).await;
        let id = sim.runtime.newest(&uid, &format!("c-{name}")).unwrap().id().to_owned();
        sim.kill(Service::CriProxy).await;
        sim.delete(&name, None);
        let view = sim.wait_view(&name, "it is waited for", |v| v.waiting.as_ref().is_some_and(is_met)).await;
        sim.up(Service::CriProxy);
        sim.wait_gone(&name).await;
        assert_eq!(sim.calls_about(Method::StopContainer, &id), 1);
        assert_eq!(sim.warnings(&name), []);
        if view.waiting.is_some_and(|w| w.reason == "PreStopHook") {
            assert_eq!(execs(&sim, "drain"), attempt + 1);
            sim.finish().await;
            return;
        }
    }
    panic!("no hook was waited for");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_start_request_without_a_response_ends_with_its_pod() {
    let sim = Sim::start(Options::default()).await;
    // It accepts connections and sends nothing.
    let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let get = json!({"httpGet": {"host": "127.0.0.1", "port": port}});
    let uid = sim.create(with_hook("silent", "postStart", get));
    sim.wait_view("silent", "its hook runs", |v| {
        v.waiting.as_ref().is_some_and(|w| w.reason == "PostStartHook")
    })
    .await;
    let began = Instant::now();
    sim.delete("silent", None);
    sim.wait_nothing_left(&uid).await;
    sim.wait_gone("silent").await;
    assert!(began.elapsed() < Duration::from_secs(20), "it took {:?}", began.elapsed());
    assert_eq!(sim.warnings("silent"), [], "a hook that the pod's end cut off has not failed");
    sim.finish().await;
}
