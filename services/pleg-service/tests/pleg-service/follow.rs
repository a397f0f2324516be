//! Followers of a pleg-service on a fake runtime: two at once, a broken connection, a leader that crashes.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use pleg_service::traits::HintKind;
use quintlet_proto::pleg::v1 as pb;
use quintlet_proto::pleg::v1::lifecycle_event::Event;
use quintlet_proto::pleg::v1::pleg_client::PlegClient;
use quintlet_testkit::fake_runtime::{ContainerSeed, FakeRuntime, Method, Options};
use tonic::Code;

use crate::common::{Bench, Watch, options};

fn pod(runtime: &FakeRuntime, uid: &str) -> (String, String) {
    let sandbox = runtime.add_sandbox(uid, uid, "default", 0);
    let id = runtime.add_container(&sandbox, &ContainerSeed::running("main"));
    (sandbox, id)
}

fn exited(uid: &'static str, id: &str) -> impl Fn(&Watch) -> bool {
    let id = id.to_owned();
    move |w| w.state(uid, &id) == Some(pb::ContainerState::Exited)
}

#[tokio::test(start_paused = true)]
async fn two_followers_serve_the_leaders_records_and_cursors_without_inspections() {
    let (mut sandbox, mut id) = Default::default();
    let bench = Bench::new(options(Duration::ZERO), true, |r| {
        (sandbox, id) = pod(r, "u1");
        pod(r, "u2");
    });
    let first = bench.follower(&bench.socket, "a.sock");
    // A follower of a follower serves like any other.
    let second = bench.follower(&first.socket, "b.sock");
    let mut watches = Vec::new();
    for client in [&bench.client, &first.client, &first.client, &second.client, &second.client] {
        let mut watch = Watch::open(client, None).await;
        watch.snapshot().await;
        watches.push(watch);
    }
    first.wait_serving(true).await;
    second.wait_serving(true).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let inspected = bench.runtime.count(Method::ContainerStatus);
    let request = pb::LifecycleRequest { hello: None, uid: "u1".to_owned() };
    let mut events = second.client.clone().lifecycle(request).await.unwrap().into_inner();
    assert!(matches!(events.message().await.unwrap().unwrap().event, Some(Event::Hello(_))));
    bench.runtime.exit(&id, 3);
    bench.hints.hint(HintKind::Exited, &id);
    for watch in &mut watches {
        watch.until("exit", exited("u1", &id)).await;
    }
    assert_eq!(bench.runtime.count(Method::ContainerStatus), inspected + 1, "one inspection for all");
    let died = events.message().await.unwrap().unwrap();
    let Some(Event::Lifecycle(event)) = &died.event else { panic!("{died:?}") };
    assert_eq!((event.kind(), event.exit_code, died.cursor), (pb::LifecycleKind::Died, 3, watches[0].cursor));
    bench.runtime.remove(&sandbox);
    bench.hints.hint(HintKind::Deleted, &sandbox);
    let (leader, followers) = watches.split_first_mut().unwrap();
    leader.until("gone", |w| !w.pods.contains_key("u1")).await;
    for watch in followers {
        watch.until("gone", |w| !w.pods.contains_key("u1")).await;
        assert_eq!((&watch.pods, watch.cursor), (&leader.pods, leader.cursor), "record for record");
    }
    let health = second.health().await;
    assert!(health.healthy && health.hints_live && health.pods == 1, "{health:?}");
    assert_eq!(health.epoch, leader.cursor.unwrap().epoch);
}

#[tokio::test(start_paused = true)]
async fn an_observe_request_is_forwarded_to_the_leader_and_all_publish_its_result() {
    let mut id = String::new();
    let bench = Bench::new(options(Duration::ZERO), true, |r| id = pod(r, "u1").1);
    let follower = bench.follower(&bench.socket, "a.sock");
    let mut watch = Watch::open(&follower.client, None).await;
    watch.snapshot().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    bench.runtime.exit(&id, 1);
    let request = pb::ObserveRequest { uid: "u1".to_owned(), ..Default::default() };
    let reply = follower.client.clone().observe(request.clone()).await.unwrap().into_inner();
    assert_eq!(reply.pod.unwrap().containers[0].state(), pb::ContainerState::Exited);
    watch.until("the answer", exited("u1", &id)).await;
    assert_eq!(watch.cursor, reply.cursor);
    let bad = pb::ObserveRequest { uid: "../x".to_owned(), ..Default::default() };
    assert_eq!(follower.client.clone().observe(bad).await.unwrap_err().code(), Code::InvalidArgument);
    bench.down();
    follower.wait_serving(false).await;
    let error = follower.client.clone().observe(request).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("pleg.sock"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_watcher_that_moves_to_another_follower_receives_exactly_the_missed_records() {
    let (mut one, mut three) = <((String, String), (String, String))>::default();
    let bench = Bench::new(options(Duration::ZERO), false, |r| {
        one = pod(r, "u1");
        pod(r, "u2");
        three = pod(r, "u3");
    });
    let (first, second) = (bench.follower(&bench.socket, "a.sock"), bench.follower(&bench.socket, "b.sock"));
    first.wait_serving(true).await;
    second.wait_serving(true).await;
    let mut watch = Watch::open(&first.client, None).await;
    watch.snapshot().await;
    let cursor = watch.cursor;
    drop((watch, first));
    bench.runtime.exit(&one.1, 0);
    bench.runtime.remove(&three.0);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut watch = Watch::open(&second.client, cursor).await;
    watch.until("both changes", |w| w.log.len() >= 3).await;
    let mut log = watch.log[1..].to_vec();
    log.sort();
    assert_eq!(log, ["gone u3", "pod u1"]);
    // The watcher returns to the leader itself.
    let mut watch = bench.watch(watch.cursor).await;
    watch.until("beat", |w| w.log.len() >= 2).await;
    assert_eq!(watch.log, ["hello", "beat"], "nothing missed, nothing sent");
    // A follower that started later does not know of earlier removals, and sends a resync.
    let late = bench.follower(&bench.socket, "c.sock");
    late.wait_serving(true).await;
    let mut watch = Watch::open(&late.client, cursor).await;
    watch.snapshot().await;
    assert_eq!(watch.log[1], "resync");
    assert_eq!(watch.pods.keys().collect::<Vec<_>>(), ["u1", "u2"]);
}

#[tokio::test(start_paused = true)]
async fn a_broken_connection_to_the_leader_is_resumed_at_its_cursor() {
    let (mut one, mut two) = <((String, String), (String, String))>::default();
    let bench = Bench::new(options(Duration::ZERO), false, |r| (one, two) = (pod(r, "u1"), pod(r, "u2")));
    let line = bench.line();
    let follower = bench.follower(&line.path, "a.sock");
    let mut watch = Watch::open(&follower.client, None).await;
    watch.snapshot().await;
    let mut seen = watch.log.len();
    for (id, uid) in [(&one.1, "u1"), (&two.1, "u2")] {
        line.cut();
        bench.runtime.exit(id, 0);
        watch.until("the exit", exited(uid, id)).await;
        let news: Vec<_> = watch.log[seen..].iter().filter(|l| *l != "beat").cloned().collect();
        assert_eq!(news, [format!("pod {uid}")], "just that, and no picture");
        seen = watch.log.len();
    }
    follower.wait_serving(true).await;
}

#[tokio::test(start_paused = true)]
async fn a_dead_leader_removes_no_pod_and_its_successor_causes_a_resync() {
    let (mut one, mut two) = <((String, String), (String, String))>::default();
    let mut bench = Bench::new(options(Duration::ZERO), false, |r| (one, two) = (pod(r, "u1"), pod(r, "u2")));
    let followers = [bench.follower(&bench.socket, "a.sock"), bench.follower(&bench.socket, "b.sock")];
    let mut watches = Vec::new();
    for follower in &followers {
        let mut watch = Watch::open(&follower.client, None).await;
        watch.snapshot().await;
        watches.push(watch);
    }
    let before = watches[0].cursor.unwrap();
    bench.down();
    for follower in &followers {
        follower.wait_serving(false).await;
        let health = follower.health().await;
        assert!(!health.healthy && health.message.contains("pleg.sock is away"), "{health:?}");
        assert_eq!(health.pods, 2);
    }
    bench.runtime.remove(&two.0);
    for (watch, follower) in watches.iter_mut().zip(&followers) {
        let seen = watch.log.len();
        watch.until("three beats", |w| w.log.len() >= seen + 3).await;
        assert!(watch.log[seen..].iter().all(|l| l == "beat"), "{:?}", watch.log);
        // A new watcher gets the last snapshot; an existing one resumes at its cursor.
        let mut new = Watch::open(&follower.client, None).await;
        new.snapshot().await;
        assert_eq!(new.pods.len(), 2);
        let mut back = Watch::open(&follower.client, watch.cursor).await;
        back.until("beat", |w| w.log.len() >= 2).await;
        assert_eq!(back.log, ["hello", "beat"]);
    }
    bench.up();
    for (watch, follower) in watches.iter_mut().zip(&followers) {
        watch.until("resync", |w| w.cursor.is_some_and(|c| c.epoch > before.epoch)).await;
        let last: Vec<_> = watch.log.iter().rev().take_while(|l| *l != "beat").collect();
        assert_eq!(last, ["end", "pod u1", "begin", "resync"], "{:?}", watch.log);
        assert_eq!((watch.pods.len(), watch.gone.len()), (1, 0));
        follower.wait_serving(true).await;
        assert!(follower.health().await.healthy);
    }
}

/// A process that is killed when the test ends.
struct Process(Child);

impl Process {
    fn start(args: &[&std::ffi::OsStr]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pleg-service"));
        Self(command.args(args).stdin(Stdio::null()).spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn two_followers_survive_a_kill_and_restart_of_the_leader() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str| dir.path().join(name);
    let runtime = FakeRuntime::start(&run("0/cri/read/cri.sock"), Options::silent()).unwrap();
    pod(&runtime, "u1");
    let two = pod(&runtime, "u2");
    let leader_socket = run("0/pleg/pleg.sock");
    let lead = || Process::start(&["--run-dir".as_ref(), run("0").as_ref()]);
    let mut leader = lead();
    let follow = |name: &str| {
        let follow = ["--follow".as_ref(), leader_socket.as_ref(), "--run-dir".as_ref()];
        Process::start(&[&follow[..], &[run(name).as_ref()]].concat())
    };
    let _followers = [follow("1"), follow("2")];
    let mut watches = Vec::new();
    for name in ["1", "2"] {
        let socket = run(name).join("pleg/pleg.sock");
        quintlet_kit::socket::wait_ready(&socket, Duration::from_secs(60)).await.unwrap();
        let client = PlegClient::new(quintlet_kit::socket::channel(socket));
        let mut watch = Watch::open(&client, None).await;
        watch.snapshot().await;
        watches.push((watch, client));
    }
    leader.kill();
    for (_, client) in &watches {
        let away = async || {
            let health = client.clone().health(pb::HealthRequest {}).await.unwrap().into_inner();
            (!health.healthy && health.pods == 2).then_some(())
        };
        let limit = tokio::time::Instant::now() + Duration::from_secs(60);
        while away().await.is_none() {
            assert!(tokio::time::Instant::now() < limit, "the follower does not say that its leader is away");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    runtime.remove(&two.0);
    let _leader = lead();
    for (watch, client) in &mut watches {
        watch.until("resync", |w| w.log.iter().filter(|l| *l == "end").count() == 2).await;
        let news: Vec<_> = watch.log.iter().filter(|l| *l != "beat").map(String::as_str).collect();
        assert_eq!(news[5..], ["resync", "begin", "pod u1", "end"], "{:?}", watch.log);
        assert!(watch.gone.is_empty(), "no pod was reported gone");
        let health = client.clone().health(pb::HealthRequest {}).await.unwrap().into_inner();
        assert_eq!(health.epoch, watch.cursor.unwrap().epoch);
    }
}

#[test]
fn a_follower_of_itself_is_refused_before_it_takes_the_socket() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("pleg/pleg.sock");
    std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
    std::fs::write(&socket, "the leader's").unwrap();
    for leader in [socket.clone(), dir.path().join("pleg/../pleg/pleg.sock")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pleg-service"));
        let args = ["--follow".as_ref(), leader.as_os_str(), "--run-dir".as_ref(), dir.path().as_os_str()];
        let ended = command.args(args).output().unwrap();
        assert!(!ended.status.success());
        assert!(String::from_utf8_lossy(&ended.stderr).contains("--run-dir of its own"), "{ended:?}");
        assert_eq!(std::fs::read_to_string(&socket).unwrap(), "the leader's");
    }
}
