//! A boot while the API server is away: pods start from the offline cache.

use std::path::PathBuf;
use std::time::Duration;

use quintlet_csi_driver::thread::DriverThread;
use quintlet_proto::podsync::v1::ExplainRequest;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_simulation::{EventSeen, LONG, NODE, Options, Seen, Service, Sim, pods};
use quintlet_testapi::Failure;
use quintlet_testkit::fake_runtime::{Behaviour, Method, StopReply};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

use crate::{claims, edges};

const ON: [&str; 1] = ["--offline-cache"];
/// Longer than the wait for an answer of the API server.
const AWAY: Duration = Duration::from_secs(60);
/// Longer than the wait before a change is written.
const WRITTEN: Duration = Duration::from_secs(5);

async fn start(args: &[&str]) -> Sim {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(args);
    sim.disturb();
    sim.start_all();
    sim
}

/// Reboots the machine while the API server is away.
async fn reboot(sim: &Sim) {
    // What has changed is written.
    tokio::time::sleep(WRITTEN).await;
    sim.api.faults().set_down(true);
    edges::go_down(sim).await;
    sim.wait_runtime("no process", |runtime| runtime.containers().iter().all(|c| !c.running())).await;
    for path in quintlet_csi_driver::volumes::mounts_below(&sim.root_dir()).unwrap().iter().rev() {
        nix::mount::umount(path).unwrap();
    }
    sim.start_all();
}

fn come_back(sim: &Sim) {
    sim.api.faults().set_down(false);
}

async fn wait_running(sim: &Sim, uid: &str, name: &str) {
    let what = format!("{name} runs");
    sim.wait_runtime(&what, |runtime| runtime.newest(uid, &format!("c-{name}")).is_some_and(|c| c.running()))
        .await;
}

/// Returns the IDs of the newest instances of these pods.
fn instances(sim: &Sim, pods: &[(&str, &str)]) -> Vec<String> {
    let newest = |(name, uid): &(&str, &str)| sim.runtime.newest(uid, &format!("c-{name}")).unwrap();
    pods.iter().map(|pod| newest(pod).id().to_owned()).collect()
}

fn env(sim: &Sim, uid: &str, name: &str, key: &str) -> Option<String> {
    let envs = sim.runtime.newest(uid, &format!("c-{name}")).unwrap().config.envs;
    envs.into_iter().find(|env| env.key == key).map(|env| String::from_utf8(env.value).unwrap())
}

fn cache(sim: &Sim) -> PathBuf {
    sim.root_dir().join("quintlet-offline")
}

fn cached(sim: &Sim) -> Vec<String> {
    let entries = std::fs::read_dir(cache(sim)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

async fn explained(sim: &Sim, pod: &str) -> Vec<String> {
    let mut client = PodSyncClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    let reply = client.explain(ExplainRequest { pod: pod.to_owned() }).await;
    reply.map(|reply| reply.into_inner().decision).unwrap_or_default()
}

fn objects(sim: &Sim) {
    let object = json!({"metadata": {"name": "settings"}, "data": {"k": "1"}});
    sim.api.create("configmaps", "default", object).unwrap();
    let object = json!({"metadata": {"name": "password"}, "data": {"k": "c2VjcmV0"}});
    sim.api.create("secrets", "default", object).unwrap();
    let service = json!({"metadata": {"name": "db"}, "spec": {"type": "ClusterIP", "clusterIP": "10.9.8.7",
        "ports": [{"port": 5432, "protocol": "TCP"}]}});
    sim.api.create("services", "default", service).unwrap();
}

/// Returns a pod that reads all kinds of objects.
fn rich(name: &str) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["enableServiceLinks"] = json!(true);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(2);
    pod["spec"]["imagePullSecrets"] = json!([{"name": "password"}]);
    pod["spec"]["volumes"] = json!([
        {"name": "c", "configMap": {"name": "settings"}},
        {"name": "s", "secret": {"secretName": "password"}},
        {"name": "o", "secret": {"secretName": "missing", "optional": true}},
        {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token", "expirationSeconds": 600}}]}},
        {"name": "data", "persistentVolumeClaim": {"claimName": name}},
    ]);
    let main = &mut pod["spec"]["containers"][0];
    // A registry would be away, too.
    main["imagePullPolicy"] = json!("Always");
    main["volumeMounts"] = ["c", "s", "o", "t", "data"]
        .map(|v| json!({"name": v, "mountPath": format!("/{v}")}))
        .to_vec()
        .into();
    main["env"] = json!([
        {"name": "K", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "k"}}},
        {"name": "P", "valueFrom": {"secretKeyRef": {"name": "password", "key": "k"}}},
    ]);
    pod
}

fn file(sim: &Sim, uid: &str, volume: &str) -> Option<String> {
    std::fs::read_to_string(sim.root_dir().join(format!("pods/{uid}/volumes/kubernetes.io~{volume}"))).ok()
}

async fn with_driver(args: &[&str]) -> (Sim, DriverThread, String) {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(args);
    sim.disturb();
    claims::csi_driver(&sim, json!({"attachRequired": false}));
    objects(&sim);
    claims::bound_claim(&sim, "rich", |_| {});
    sim.start_all();
    let driver = claims::start_driver(&sim);
    let uid = sim.create(rich("rich"));
    sim.wait_ready("rich").await;
    (sim, driver, uid)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_starts_from_the_cache_with_all_its_objects_and_is_not_started_again_when_the_server_is_back() {
    let (sim, driver, uid) = with_driver(&ON).await;
    let first = instances(&sim, &[("rich", uid.as_str())]);
    let token = file(&sim, &uid, "projected/t/token").unwrap();
    let pulls = sim.runtime.count(Method::PullImage);
    // The token that is kept expires, and is renewed in the volume only.
    tokio::time::sleep(Duration::from_mins(15)).await;
    assert_ne!(file(&sim, &uid, "projected/t/token"), Some(token.clone()));
    drop(driver);
    reboot(&sim).await;
    let _driver = claims::start_driver(&sim);
    wait_running(&sim, &uid, "rich").await;

    let offline = instances(&sim, &[("rich", uid.as_str())]);
    assert_ne!(offline, first);
    assert_eq!(sim.runtime.count(Method::PullImage), pulls, "the registry may be away, too");
    assert_eq!(env(&sim, &uid, "rich", "K").as_deref(), Some("1"));
    assert_eq!(env(&sim, &uid, "rich", "P").as_deref(), Some("secret"));
    assert_eq!(env(&sim, &uid, "rich", "DB_SERVICE_HOST").as_deref(), Some("10.9.8.7"));
    assert_eq!(file(&sim, &uid, "configmap/c/k").as_deref(), Some("1"));
    assert_eq!(file(&sim, &uid, "secret/s/k").as_deref(), Some("secret"));
    assert_eq!(file(&sim, &uid, "projected/t/token"), Some(token.clone()));
    assert!(claims::is_mounted(&claims::mount_of(&sim, &uid, "pv-rich")));
    let lines = explained(&sim, "default/rich").await;
    assert!(lines[0].starts_with("started from the offline cache at "), "{lines:?}");
    assert!(lines[0].ends_with("the API server has not answered since the start"), "{lines:?}");

    // A restart of pod-sync changes nothing.
    sim.restart(Service::PodSync).await;
    tokio::time::sleep(AWAY).await;
    assert_eq!(instances(&sim, &[("rich", uid.as_str())]), offline);
    assert!(explained(&sim, "default/rich").await[0].starts_with("started from the offline cache at "));

    // Written while the node does not see it.
    sim.api.edit("configmaps", "default", "settings", |object| object["data"]["k"] = json!("2")).unwrap();
    come_back(&sim);
    let is_ready = |pod: &Seen| pod.is_ready() && pod.restarts() == 1;
    sim.wait_pod("rich", "Ready after its start", is_ready).await;
    let is_started = |e: &EventSeen| e.reason == "StartedFromOfflineCache";
    sim.wait_event("rich", "of the start", is_started).await;
    until("the new content", LONG, async || {
        let found = (file(&sim, &uid, "configmap/c/k"), file(&sim, &uid, "projected/t/token"));
        if found.0.as_deref() == Some("2") && found.1 != Some(token.clone()) { Ok(()) } else { Err(found) }
    })
    .await;
    assert_eq!(instances(&sim, &[("rich", uid.as_str())]), offline, "no second start");
    let lines = explained(&sim, "default/rich").await;
    assert!(lines[0].contains("confirmed by the API server at "), "{lines:?}");
    assert_eq!(sim.events("rich").iter().filter(|e| is_started(e)).count(), 1);

    sim.delete("rich", None);
    sim.wait_gone("rich").await;
    sim.wait_nothing_left(&uid).await;
    until("only the Node in the cache", LONG, async || {
        let files = cached(&sim);
        if files == ["node"] { Ok(()) } else { Err(files) }
    })
    .await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_server_is_back_its_pods_replace_those_of_the_cache() {
    let sim = start(&ON).await;
    sim.runtime.behave("c-ending", Behaviour { stop: StopReply::Ignores, ..Behaviour::default() });
    let mut uids = Vec::new();
    for name in ["same", "deleted", "forced", "replaced", "changed", "ending"] {
        let mut pod = pods::single(name);
        pod["spec"]["terminationGracePeriodSeconds"] = json!(2);
        uids.push(sim.create(pod));
        sim.wait_ready(name).await;
    }
    let [same, deleted, forced, replaced, changed, ending] = &uids[..] else { panic!() };
    // The boot interrupts its termination.
    sim.delete("ending", Some(60));
    reboot(&sim).await;
    let started = [
        ("same", same),
        ("deleted", deleted),
        ("forced", forced),
        ("replaced", replaced),
        ("changed", changed),
    ];
    for (name, uid) in started {
        wait_running(&sim, uid, name).await;
    }
    tokio::time::sleep(AWAY).await;
    assert!(
        !sim.runtime.newest(ending, "c-ending").is_some_and(|c| c.running()),
        "its deletion was requested"
    );
    let kept = [("same", same.as_str()), ("changed", changed.as_str())];
    let before = instances(&sim, &kept);

    sim.delete("deleted", None);
    sim.delete("forced", Some(0));
    sim.delete("replaced", Some(0));
    let new = sim.create(pods::single("replaced"));
    sim.api.edit("pods", "default", "changed", |pod| pod["metadata"]["labels"] = json!({"l": "1"})).unwrap();
    come_back(&sim);
    for name in ["deleted", "forced", "ending"] {
        sim.wait_gone(name).await;
    }
    for uid in [deleted, forced, ending, replaced] {
        sim.wait_nothing_left(uid).await;
    }
    for name in ["same", "changed", "replaced"] {
        sim.wait_ready(name).await;
    }
    assert_eq!(instances(&sim, &kept), before, "the same pods are not started again");
    assert_eq!(sim.pod("replaced").uid(), new);
    let mut want = vec!["node".to_owned()];
    want.extend([same, changed, &new].map(|uid| format!("pod-{uid}")));
    want.sort_unstable();
    until("the cache has the pods of the server", LONG, async || {
        let files = cached(&sim);
        if files == want { Ok(()) } else { Err(files) }
    })
    .await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_cache_nothing_is_kept_and_nothing_starts() {
    let sim = start(&[]).await;
    let uid = sim.create(pods::single("web"));
    sim.wait_ready("web").await;
    reboot(&sim).await;
    let before = sim.runtime.count(Method::RunPodSandbox);
    tokio::time::sleep(AWAY).await;
    assert_eq!(sim.runtime.count(Method::RunPodSandbox), before);
    assert!(!cache(&sim).exists());
    come_back(&sim);
    sim.wait_pod("web", "Ready again", |pod| pod.is_ready() && pod.restarts() == 1).await;
    assert_eq!(sim.pod("web").uid(), uid);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_refuses_is_not_away() {
    let sim = start(&ON).await;
    let _uid = sim.create(pods::single("web"));
    sim.wait_ready("web").await;
    tokio::time::sleep(WRITTEN).await;
    edges::go_down(&sim).await;
    sim.api.faults().fail("*", usize::MAX, Failure::Forbidden);
    let before = sim.runtime.count(Method::RunPodSandbox);
    sim.start_all();
    tokio::time::sleep(AWAY * 3).await;
    assert_eq!(sim.runtime.count(Method::RunPodSandbox), before);
    sim.api.faults().clear();
    sim.wait_pod("web", "Ready again", |pod| pod.is_ready() && pod.restarts() == 1).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_must_not_run_twice_or_has_finished_is_not_started() {
    let sim = start(&ON).await;
    let with = |name: &str, policy: &str| {
        let mut pod = pods::single(name);
        pod["spec"]["restartPolicy"] = json!(policy);
        sim.create(pod)
    };
    let exits = Behaviour { exit: Some((Duration::from_secs(1), 0)), ..Behaviour::default() };
    sim.runtime.behave("c-done", exits);
    let once = with("once", "Never");
    let done = with("done", "OnFailure");
    let again = with("again", "OnFailure");
    sim.wait_ready("once").await;
    sim.wait_ready("again").await;
    sim.wait_pod("done", "Succeeded", |pod| pod.text("/status/phase") == "Succeeded").await;
    reboot(&sim).await;
    wait_running(&sim, &again, "again").await;
    tokio::time::sleep(AWAY).await;
    for (name, uid) in [("once", &once), ("done", &done)] {
        assert!(!sim.runtime.newest(uid, &format!("c-{name}")).is_some_and(|c| c.running()), "{name}");
    }
    come_back(&sim);
    sim.wait_pod("once", "Failed, as after any boot", |pod| pod.text("/status/phase") == "Failed").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_are_torn_foreign_or_of_another_key_or_node_are_ignored_and_written_again() {
    let keys = tempfile::tempdir().unwrap();
    let key = |name: &str, byte: u8| {
        let path = keys.path().join(name);
        std::fs::write(&path, [byte; 32]).unwrap();
        format!("--offline-credential={}", path.display())
    };
    let (one, two) = (key("one", 1), key("two", 2));
    let mut sim = start(&[ON[0], &one]).await;
    sim.api
        .create("secrets", "default", json!({"metadata": {"name": "s"}, "data": {"k": "c2VjcmV0"}}))
        .unwrap();
    let mut pod = pods::single("web");
    pod["spec"]["volumes"] = json!([{"name": "v", "secret": {"secretName": "s"}}]);
    let uid = sim.create(pod);
    let torn = sim.create(pods::single("torn"));
    sim.wait_ready("web").await;
    sim.wait_ready("torn").await;
    tokio::time::sleep(WRITTEN).await;
    let place = cache(&sim).join(format!("pod-{torn}"));
    let whole = std::fs::read(&place).unwrap();
    let text = std::fs::read(cache(&sim).join(format!("pod-{uid}"))).unwrap();
    assert!(!text.windows(8).any(|part| part == b"c2VjcmV0"), "the Secret is encrypted");

    // One file is torn: the other pod starts.
    std::fs::write(&place, &whole[..whole.len() / 2]).unwrap();
    reboot(&sim).await;
    wait_running(&sim, &uid, "web").await;
    let ignored = |sim: &Sim| -> Vec<String> {
        let log = sim.log();
        let lines = log.iter().filter(|line| line["msg"] == "file of the offline cache ignored");
        lines.map(|line| line["reason"].as_str().unwrap_or_default().to_owned()).collect()
    };
    assert_eq!(ignored(&sim), ["the file is incomplete or was changed"]);
    assert!(!sim.runtime.newest(&torn, "c-torn").is_some_and(|c| c.running()));
    come_back(&sim);
    sim.wait_pod("torn", "Ready again", |pod| pod.is_ready() && pod.restarts() == 1).await;
    tokio::time::sleep(WRITTEN).await;
    assert!(std::fs::read(&place).unwrap().len() > whole.len() / 2 + 1, "written again");

    // Another key, then another name of the node: nothing starts, and the files stay.
    let before = sim.runtime.count(Method::RunPodSandbox);
    sim.set_pod_sync_args(&[ON[0], &two]);
    reboot(&sim).await;
    tokio::time::sleep(AWAY).await;
    assert_eq!(sim.runtime.count(Method::RunPodSandbox), before);
    assert_eq!(ignored(&sim)[1..], ["the file is encrypted with another key"; 3].map(str::to_owned));
    assert_eq!(cached(&sim).len(), 3);
    come_back(&sim);
    sim.wait_pod("web", "Ready again", |pod| pod.is_ready() && pod.restarts() == 2).await;
    tokio::time::sleep(WRITTEN).await;

    let before = sim.runtime.count(Method::RunPodSandbox);
    sim.set_pod_sync_args(&[ON[0], &two, "--node-name=renamed"]);
    reboot(&sim).await;
    tokio::time::sleep(AWAY).await;
    assert_eq!(sim.runtime.count(Method::RunPodSandbox), before);
    assert_eq!(ignored(&sim)[4..], ["the file belongs to the node sim-node"; 3].map(str::to_owned));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_the_node_does_not_admit_while_the_server_is_away_waits_for_it_and_does_not_fail() {
    let sim = start(&ON).await;
    let mut pod = pods::single("web");
    pod["spec"]["nodeSelector"] = json!({"pool": "a"});
    until("the Node", LONG, async || {
        let node = NODE;
        let edited = sim.api.edit("nodes", "", node, |node| node["metadata"]["labels"]["pool"] = json!("a"));
        edited.map(drop).map_err(|e| format!("{e:?}"))
    })
    .await;
    let uid = sim.create(pod);
    let gone = sim.create(pods::single("gone"));
    sim.wait_ready("web").await;
    sim.wait_ready("gone").await;
    tokio::time::sleep(WRITTEN).await;
    // Without the Node, its label is not known.
    std::fs::remove_file(cache(&sim).join("node")).unwrap();
    reboot(&sim).await;
    wait_running(&sim, &gone, "gone").await;
    sim.wait_view("web", "waits", |view| view.waiting.as_ref().is_some_and(|w| w.reason == "NotAdmitted"))
        .await;
    tokio::time::sleep(AWAY).await;
    assert!(!sim.runtime.newest(&uid, "c-web").is_some_and(|c| c.running()));
    come_back(&sim);
    sim.wait_pod("web", "Ready again", |pod| pod.is_ready() && pod.restarts() == 1).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_at_rest_writes_nothing_to_its_cache_while_tokens_are_renewed() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&ON);
    sim.cuts().record_files();
    sim.start_all();
    let token = json!({"serviceAccountToken": {"path": "token", "expirationSeconds": 600}});
    let mut uids = Vec::new();
    for name in ["a", "b", "c"] {
        let mut pod = pods::single(name);
        pod["spec"]["volumes"] = json!([{"name": "t", "projected": {"sources": [token]}}]);
        pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "t", "mountPath": "/t"}]);
        pod["spec"]["containers"][0]["readinessProbe"] =
            json!({"exec": {"command": ["probe"]}, "periodSeconds": 10});
        uids.push(sim.create(pod));
    }
    for name in ["a", "b", "c"] {
        sim.wait_ready(name).await;
    }
    tokio::time::sleep(AWAY).await;
    let of_cache = |sim: &Sim| -> Vec<PathBuf> {
        let written = sim.cuts().written_files().into_iter().map(|write| write.path);
        written.filter(|path| path.starts_with(cache(sim))).collect()
    };
    let before = of_cache(&sim);
    // Each pod once, or twice if its start took longer than the wait, and the Node a few times.
    let limit = 3 * uids.len() + 5;
    assert!((1 + uids.len()..=limit).contains(&before.len()), "{before:?}");
    let tokens: Vec<_> = uids.iter().map(|uid| file(&sim, uid, "projected/t/token")).collect();
    tokio::time::sleep(Duration::from_mins(30)).await;
    let renewed: Vec<_> = uids.iter().map(|uid| file(&sim, uid, "projected/t/token")).collect();
    assert_ne!(renewed, tokens, "tokens were renewed");
    assert_eq!(of_cache(&sim)[before.len()..], [""; 0].map(PathBuf::from));
    sim.finish().await;
}
