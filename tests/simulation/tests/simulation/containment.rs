//! Panics and crashes in the work of one pod do not affect other pods.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_kit::contain::EXIT_PANIC;
use quintlet_kit::socket;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{ExplainReply, ExplainRequest, RetryRequest, VolumeState};
use quintlet_simulation::{LONG, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::json;
use tokio::process::{Child, Command};

const REASON: &str = "InternalError";

fn client(sim: &Sim) -> PodSyncClient<tonic::transport::Channel> {
    PodSyncClient::new(socket::channel(sim.paths().podsync()))
}

async fn explain(sim: &Sim, pod: &str) -> ExplainReply {
    let reply = client(sim).explain(ExplainRequest { pod: pod.to_owned() }).await;
    reply.expect("pod-sync explains").into_inner()
}

async fn retry(sim: &Sim, pod: &str) -> bool {
    let reply = client(sim).retry(RetryRequest { pod: pod.to_owned() }).await;
    reply.expect("pod-sync tries again").into_inner().waited
}

async fn wait_contained(sim: &Sim, pod: &str, what: &str) {
    sim.wait_view(pod, REASON, |view| {
        view.waiting.as_ref().is_some_and(|w| {
            w.reason == REASON && w.message.contains(what) && w.until_unix_ns > w.since_unix_ns
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_in_the_work_of_one_pod_ends_only_that_work_and_retry_resumes_it() {
    // While it is added, while its actions are computed, on a blocking thread, and at the end.
    for step in ["pod taken over", "actions decided", "cgroup made"] {
        let sim = Sim::start(Options::default()).await;
        sim.cuts().panic_at(Some((step, "bad")));
        let bad = sim.create(pods::single("bad"));
        let good: Vec<String> = (0..3).map(|n| sim.create(pods::single(&format!("good{n}")))).collect();
        for (n, uid) in good.iter().enumerate() {
            let name = format!("good{n}");
            sim.wait_ready(&name).await;
            sim.assert_started_once(&name, uid);
        }
        let text = format!("injected into {step:?}");
        wait_contained(&sim, "bad", &text).await;
        let shown = explain(&sim, "bad").await;
        let waiting = shown.pod.and_then(|pod| pod.waiting).expect("it waits");
        assert!(waiting.message.contains("panicked at ") && waiting.message.contains(&text), "{waiting:?}");
        assert_eq!(shown.last_errors, [waiting.message], "{step}");
        sim.wait_event("bad", REASON, |e| e.kind == "Warning" && e.reason == REASON).await;
        // It is suspended: a second panic follows after a longer wait.
        sim.cuts().panic_at(None);
        assert!(retry(&sim, "bad").await, "{step}: it waited");
        sim.wait_ready("bad").await;
        assert_eq!(sim.sandboxes(&bad).len(), 1, "{step}");
        assert!(!retry(&sim, "bad").await, "{step}: it does not wait any more");
        // Its termination is contained as well.
        sim.cuts().panic_at(Some(("cgroup removed", "bad")));
        sim.delete("bad", Some(0));
        wait_contained(&sim, "bad", "injected into \"cgroup removed\"").await;
        sim.cuts().panic_at(None);
        assert!(retry(&sim, "bad").await);
        sim.wait_gone("bad").await;
        sim.wait_nothing_left(&bad).await;
        for (n, uid) in good.iter().enumerate() {
            sim.assert_started_once(&format!("good{n}"), uid);
        }
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_while_volumes_are_set_up_or_removed_leaves_them_uncertain_and_a_retry_completes_the_work() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("bad");
    pod["spec"]["volumes"] = json!([
        {"name": "first", "emptyDir": {}}, {"name": "second", "emptyDir": {"medium": "Memory"}},
    ]);
    let at = |name: &str| json!({"name": name, "mountPath": format!("/{name}")});
    pod["spec"]["containers"][0]["volumeMounts"] = json!([at("first"), at("second")]);
    let uncertain = async |volumes: &[&str]| {
        let shown = explain(&sim, "bad").await.volumes;
        let interrupted: Vec<&str> = shown
            .iter()
            .filter(|volume| volume.error.ends_with("the operation was interrupted"))
            .filter(|volume| volume.state() == VolumeState::Uncertain)
            .map(|volume| volume.spec_name.as_str())
            .collect();
        assert_eq!(interrupted, volumes, "{shown:?}");
    };
    sim.cuts().panic_at(Some(("volume mounted", "bad")));
    let bad = sim.create(pod);
    wait_contained(&sim, "bad", "injected into \"volume mounted\"").await;
    uncertain(&["second"]).await;
    sim.cuts().panic_at(None);
    assert!(retry(&sim, "bad").await);
    sim.wait_ready("bad").await;
    uncertain(&[]).await;
    sim.cuts().panic_at(Some(("volume unmounted", "bad")));
    sim.delete("bad", Some(0));
    wait_contained(&sim, "bad", "injected into \"volume unmounted\"").await;
    uncertain(&["second"]).await;
    sim.cuts().panic_at(None);
    assert!(retry(&sim, "bad").await);
    sim.wait_gone("bad").await;
    sim.wait_nothing_left(&bad).await;
    sim.finish().await;
}

// cri-proxy exits with `note`, and is started again once pod-sync has read the note.
async fn end_cri_proxy(sim: &Sim, note: &str) {
    let path = sim.paths().exit("cri-proxy");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    sim.kill(Service::CriProxy).await;
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(note.as_bytes()).unwrap();
    // The kernel's time is behind that of the simulation.
    file.set_modified(std::time::SystemTime::now()).unwrap();
    wait_note_taken(sim).await;
}

async fn wait_note_taken(sim: &Sim) {
    let path = sim.paths().exit("cri-proxy");
    until("the note is read", LONG, async || if path.exists() { Err("it is there") } else { Ok(()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_calls_crash_cri_proxy_is_suspended_and_a_kill_suspends_none() {
    for (note, is_aside) in [("signal ABRT", true), ("signal KILL", false), ("exit-code 70", false)] {
        let sim = Sim::start(Options::default()).await;
        let good = sim.create(pods::single("good"));
        sim.wait_ready("good").await;
        let hang = sim.runtime.script(Rule::on(Method::RunPodSandbox).about("bad").hang());
        let _bad = sim.create(pods::single("bad"));
        for n in 1..=2 {
            sim.wait_calls(Method::RunPodSandbox, "bad", n).await;
            end_cri_proxy(&sim, note).await;
            if n == 2 && is_aside {
                wait_contained(&sim, "bad", "cri-proxy crashed while it worked on this pod: SIGABRT").await;
            }
            sim.up(Service::CriProxy);
        }
        if !is_aside {
            sim.wait_calls(Method::RunPodSandbox, "bad", 3).await;
            end_cri_proxy(&sim, note).await;
            sim.up(Service::CriProxy);
        }
        sim.runtime.unscript(hang);
        if is_aside {
            let calls = sim.calls_about(Method::RunPodSandbox, "bad");
            // Other pods run beside it.
            let _late = sim.create(pods::single("late"));
            sim.wait_ready("late").await;
            assert_eq!(sim.calls_about(Method::RunPodSandbox, "bad"), calls, "it is not tried");
            assert!(retry(&sim, "bad").await, "{note}");
        }
        sim.wait_ready("bad").await;
        assert_eq!(sim.warnings("bad").iter().any(|e| e.reason == REASON), is_aside, "{note}");
        sim.assert_started_once("good", &good);
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_suspected_of_one_cri_proxy_crash_are_worked_on_one_at_a_time() {
    let sim = Sim::start(Options::default()).await;
    let hang = sim.runtime.script(Rule::on(Method::RunPodSandbox).hang());
    let names = ["one", "two", "three"];
    let _uids = names.map(|name| sim.create(pods::single(name)));
    let tried = || names.map(|name| sim.calls_about(Method::RunPodSandbox, name));
    for n in 1..=2 {
        for name in names {
            sim.wait_calls(Method::RunPodSandbox, name, n).await;
        }
        end_cri_proxy(&sim, "signal SEGV").await;
        if n == 2 {
            // Enough for three passes of each pod. Passes without cri-proxy do not clear a suspicion.
            tokio::time::sleep(Duration::from_secs(4)).await;
        }
        sim.up(Service::CriProxy);
    }
    until("the next try", LONG, async || {
        let tried = tried();
        if tried.iter().sum::<usize>() > 6 { Ok(()) } else { Err(tried) }
    })
    .await;
    // If they did not take turns, all three would be tried within 100 ms.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut after = tried();
    after.sort_unstable();
    assert_eq!(after, [2, 2, 3], "one is tried and the others wait for it");
    sim.runtime.unscript(hang);
    sim.restart(Service::CriProxy).await;
    for name in names {
        sim.wait_ready(name).await;
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_back_off_after_a_panic_expires() {
    let sim = Sim::start(Options::default()).await;
    sim.cuts().panic_at(Some(("actions decided", "bad")));
    let _uid = sim.create(pods::single("bad"));
    wait_contained(&sim, "bad", "injected").await;
    sim.cuts().panic_at(None);
    sim.wait_ready("bad").await;
    sim.finish().await;
}

// A service as a process that is restarted as by a supervisor.
struct Mortal<'a> {
    sim: &'a Sim,
    program: &'static str,
    line: Vec<String>,
    env: [(&'static str, String); 3],
    slow_at: &'static str,
    child: Option<Child>,
}

impl<'a> Mortal<'a> {
    fn new(sim: &'a Sim, death_kind: &str, at: &str) -> Self {
        let program = env!("CARGO_BIN_EXE_mortal-pod-sync");
        Self {
            sim,
            program,
            line: sim.pod_sync_line(),
            env: death(death_kind, at, "default/bad"),
            slow_at: "",
            child: None,
        }
    }

    // cri-proxy knows the UID of a pod alone.
    fn cri_proxy(sim: &'a Sim, death_kind: &str, uid: &str) -> Self {
        let (program, env) =
            (env!("CARGO_BIN_EXE_mortal-cri-proxy"), death(death_kind, "mutation queued", uid));
        Self { sim, program, line: sim.cri_proxy_line(), env, slow_at: "", child: None }
    }

    fn start(&mut self) {
        let path = self.sim.root_dir().with_file_name("mortal.log");
        let log = std::fs::File::options().create(true).append(true).open(path);
        let log = log.expect("a log can be written");
        let child = Command::new(self.program)
            .args(&self.line[1..])
            .envs(self.env.clone())
            .env("QUINTLET_DIES_NOTE", self.blocked())
            .env("QUINTLET_SLOW_AT", self.slow_at)
            .stdout(log.try_clone().expect("a log can be written"))
            .stderr(log)
            .kill_on_drop(true)
            .spawn();
        self.child = Some(child.expect("the service can be started"));
    }

    // Returns the file that exists once a thread is blocked in the work of the pod.
    fn blocked(&self) -> PathBuf {
        self.sim.root_dir().with_file_name("blocked")
    }

    async fn wait_blocked(&self) {
        let path = self.blocked();
        until("a thread that is blocked in the work of the pod", LONG, async || {
            std::fs::remove_file(&path).map_err(|e| e.to_string())
        })
        .await;
    }

    fn pid(&self) -> Pid {
        let id = self.child.as_ref().and_then(Child::id).expect("it runs");
        Pid::from_raw(id.cast_signed())
    }

    // Waits for its exit and records it as a supervisor does.
    async fn end(&mut self) -> ExitStatus {
        let child = self.child.as_mut().expect("it was started");
        let ended = tokio::time::timeout(LONG, child.wait()).await.expect("it ends in time").unwrap();
        let note = match (ended.code(), ended.signal()) {
            (Some(code), _) => format!("exit-code {code}"),
            (None, Some(signal)) => {
                let name = Signal::try_from(signal).expect("a signal").as_str().trim_start_matches("SIG");
                format!("signal {name}")
            }
            (None, None) => "unknown".to_owned(),
        };
        let path = self.sim.paths().exit(&self.line[0]);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, note).unwrap();
        ended
    }
}

fn death(death_kind: &str, at: &str, work: &str) -> [(&'static str, String); 3] {
    [("QUINTLET_DIES_AT", at), ("QUINTLET_DIES_FOR", work), ("QUINTLET_DIES_BY", death_kind)]
        .map(|(name, value)| (name, value.to_owned()))
}

async fn start_but(missing: Service) -> Sim {
    let sim = Sim::prepare(Options::default()).await;
    sim.disturb();
    for service in Service::ALL.into_iter().filter(|service| *service != missing) {
        sim.up(service);
    }
    sim
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_calls_abort_cri_proxy_is_suspended_and_the_others_run() {
    for (death_kind, signal) in [("abort", "SIGABRT"), ("stack", "SIGABRT")] {
        let sim = start_but(Service::CriProxy).await;
        let bad = sim.create(pods::single("bad"));
        let good: Vec<String> = (0..5).map(|n| sim.create(pods::single(&format!("good{n}")))).collect();
        let mut cri_proxy = Mortal::cri_proxy(&sim, death_kind, &bad);
        let mut deaths = 0;
        loop {
            cri_proxy.start();
            let is_aside = wait_contained(&sim, "bad", "cri-proxy crashed while it worked on this pod");
            tokio::select! {
                () = is_aside => break,
                ended = cri_proxy.end() => {
                    assert_eq!(ended.signal(), Some(Signal::SIGABRT as i32), "{death_kind}: {ended}");
                    deaths += 1;
                    assert!(deaths <= 4, "{death_kind}: it dies again and again");
                    // systemd waits 200 ms before it starts the service again.
                    wait_note_taken(&sim).await;
                }
            }
        }
        assert!(deaths >= 2, "{death_kind}: {deaths} deaths");
        for (n, uid) in good.iter().enumerate() {
            let name = format!("good{n}");
            sim.wait_ready(&name).await;
            sim.assert_started_once(&name, uid);
        }
        let shown = explain(&sim, "bad").await;
        assert!(
            shown.last_errors.iter().any(|e| e.contains(signal)),
            "{death_kind}: {:?}",
            shown.last_errors
        );
        sim.wait_event("bad", REASON, |e| e.kind == "Warning" && e.reason == REASON).await;
        // The pod is set aside and ends no further process.
        let before = cri_proxy.pid();
        let late = sim.create(pods::single("late"));
        sim.wait_ready("late").await;
        sim.assert_started_once("late", &late);
        assert_eq!(cri_proxy.pid(), before, "{death_kind}");
        assert!(kill(before, Signal::SIGKILL).is_ok());
        cri_proxy.end().await;
        let mut harmless = Mortal::cri_proxy(&sim, "", &bad);
        harmless.start();
        assert!(retry(&sim, "bad").await, "{death_kind}: it waited");
        sim.wait_ready("bad").await;
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_of_cri_proxy_during_a_call_of_a_pod_suspends_none() {
    let sim = start_but(Service::CriProxy).await;
    let bad = sim.create(pods::single("bad"));
    let mut blocked = Mortal::cri_proxy(&sim, "block", &bad);
    for _ in 0..4 {
        blocked.start();
        blocked.wait_blocked().await;
        kill(blocked.pid(), Signal::SIGKILL).unwrap();
        assert_eq!(blocked.end().await.signal(), Some(Signal::SIGKILL as i32));
    }
    let mut harmless = Mortal::cri_proxy(&sim, "", &bad);
    harmless.start();
    sim.wait_ready("bad").await;
    let warned = sim.warnings("bad");
    assert!(warned.iter().all(|e| e.reason != REASON), "{warned:?}");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_crashes_the_process_is_suspended_and_the_others_run() {
    // In the last case the process crashes while a thread applies a change of another pod.
    for (death_kind, at, slow_at) in [
        ("abort", "actions decided", ""),
        ("stack", "cgroup made", ""),
        ("abort", "actions decided", "pod taken over"),
    ] {
        let sim = start_but(Service::PodSync).await;
        let _bad = sim.create(pods::single("bad"));
        let good: Vec<String> = (0..5).map(|n| sim.create(pods::single(&format!("good{n}")))).collect();
        let mut pod_sync = Mortal { slow_at, ..Mortal::new(&sim, death_kind, at) };
        let case = format!("{death_kind} at {at:?}, slow at {slow_at:?}");
        let mut deaths = 0;
        loop {
            pod_sync.start();
            let is_aside = async {
                wait_contained(&sim, "bad", "crashed while it worked on this pod").await;
            };
            tokio::select! {
                () = is_aside => break,
                ended = pod_sync.end() => {
                    assert_eq!(ended.signal(), Some(Signal::SIGABRT as i32), "{case}: {ended}");
                    deaths += 1;
                    assert!(deaths <= 4, "{case}: it dies again and again");
                }
            }
        }
        assert!(deaths >= 2, "{case}: {deaths} deaths");
        for (n, uid) in good.iter().enumerate() {
            let name = format!("good{n}");
            sim.wait_ready(&name).await;
            sim.assert_started_once(&name, uid);
        }
        let shown = explain(&sim, "bad").await;
        assert!(shown.last_errors.iter().any(|e| e.contains("SIGABRT")), "{case}: {:?}", shown.last_errors);
        sim.wait_event("bad", REASON, |e| e.kind == "Warning" && e.reason == REASON).await;
        // A change of the pod does not end its suspension; an operator's retry does.
        let before = pod_sync.pid();
        sim.delete("bad", Some(0));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(pod_sync.pid(), before, "{case}: a deletion does not end the wait");
        assert!(kill(before, Signal::SIGKILL).is_ok());
        pod_sync.end().await;
        let mut harmless = Mortal::new(&sim, "", at);
        harmless.start();
        wait_contained(&sim, "bad", "crashed while it worked on this pod").await;
        assert!(retry(&sim, "bad").await);
        sim.wait_gone("bad").await;
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn external_kills_and_a_panic_outside_of_pod_work_suspend_no_pod() {
    let sim = start_but(Service::PodSync).await;
    let _bad = sim.create(pods::single("bad"));
    let mut pod_sync = Mortal::new(&sim, "", "");
    for n in 0..6 {
        pod_sync.start();
        if n % 2 == 0 {
            tokio::time::sleep(Duration::from_millis(100 * n)).await;
        } else {
            sim.wait_ready("bad").await;
        }
        kill(pod_sync.pid(), Signal::SIGKILL).unwrap();
        assert_eq!(pod_sync.end().await.signal(), Some(Signal::SIGKILL as i32));
    }
    // A thread is in the work of the pod, which is recorded at that time.
    let mut blocked = Mortal::new(&sim, "block", "actions decided");
    for _ in 0..4 {
        blocked.start();
        blocked.wait_blocked().await;
        kill(blocked.pid(), Signal::SIGKILL).unwrap();
        assert_eq!(blocked.end().await.signal(), Some(Signal::SIGKILL as i32));
    }
    let mut panics = Mortal::new(&sim, "task", "pod worker pass");
    for _ in 0..3 {
        panics.start();
        let ended = panics.end().await;
        assert_eq!(ended.code(), Some(EXIT_PANIC), "{ended}");
    }
    pod_sync.start();
    let view = sim.wait_view("bad", "Ready", |view| view.ready == "1/1").await;
    assert!(view.waiting.is_none_or(|w| w.reason != REASON));
    until("no warning", LONG, async || {
        let warned = sim.warnings("bad");
        if warned.iter().all(|e| e.reason != REASON) { Ok(()) } else { Err(warned) }
    })
    .await;
    sim.finish().await;
}
