//! ConfigMaps and Secrets: how they reach pods, and what that costs the API server.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use quintlet_kit::messages::whole;
use quintlet_kit::task;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::volumes_client::VolumesClient;
use quintlet_proto::podsync::v1::{ExplainRequest, ListVolumesRequest, VolumeState};
use quintlet_simulation::{LONG, NODE, Options, Seen, Service, Sim, pods};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

const NO_SYNC: &str = "--sync-frequency=1h";
const SECOND: Duration = Duration::from_secs(1);

async fn start(args: &[&str]) -> Sim {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(args);
    sim.start_all();
    sim
}

fn config_map(sim: &Sim, name: &str, value: &str) {
    let object = json!({"metadata": {"name": name}, "data": {"k": value}});
    sim.api.create("configmaps", "default", object).unwrap();
}

fn write(sim: &Sim, name: &str, value: &str) {
    sim.api.edit("configmaps", "default", name, |object| object["data"]["k"] = json!(value)).unwrap();
}

/// Returns a pod with a volume `v` of a ConfigMap.
fn with_config_map(pod: &str, config_map: &str) -> Value {
    let mut pod = pods::single(pod);
    pod["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": config_map}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    pod
}

/// Returns the path of key `k` in a volume of a pod.
fn file(sim: &Sim, uid: &str, plugin: &str, volume: &str) -> PathBuf {
    sim.root_dir().join(format!("pods/{uid}/volumes/kubernetes.io~{plugin}/{volume}/k"))
}

async fn wait_content(path: &Path, want: &str, limit: Duration) {
    until(&format!("{want} in {}", path.display()), limit, async || match std::fs::read_to_string(path) {
        Ok(content) if content == want => Ok(()),
        other => Err(other),
    })
    .await;
}

/// Returns the numbers of gets, lists and watches of a resource.
fn requests(sim: &Sim, resource: &str) -> [u64; 3] {
    ["get", "list", "watch"].map(|verb| sim.api.counts().of(format!("{verb} {resource}").as_str()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_reaches_the_files_of_running_pods_within_a_second_and_restarts_nothing() {
    let sim = start(&[NO_SYNC]).await;
    config_map(&sim, "shown", "1");
    sim.api
        .create("secrets", "default", json!({"metadata": {"name": "shown"}, "data": {"k": "MQ=="}}))
        .unwrap();
    let mut pod = with_config_map("updated", "shown");
    pod["spec"]["volumes"].as_array_mut().unwrap().extend([
        json!({"name": "s", "secret": {"secretName": "shown"}}),
        json!({"name": "p", "projected": {"sources": [{"configMap": {"name": "shown"}}]}}),
    ]);
    let main = &mut pod["spec"]["containers"][0];
    main["volumeMounts"] = json!([
        {"name": "v", "mountPath": "/v"}, {"name": "s", "mountPath": "/s"}, {"name": "p", "mountPath": "/p"},
        {"name": "v", "mountPath": "/part", "subPath": "k"},
    ]);
    main["env"] = json!([{"name": "K", "valueFrom": {"configMapKeyRef": {"name": "shown", "key": "k"}}}]);
    let uid = sim.create(pod);
    sim.wait_ready("updated").await;
    let first = sim.runtime.newest(&uid, "c-updated").unwrap().id().to_owned();
    for value in ["2", "3", "4"] {
        let began = Instant::now();
        write(&sim, "shown", value);
        wait_content(&file(&sim, &uid, "configmap", "v"), value, SECOND).await;
        wait_content(&file(&sim, &uid, "projected", "p"), value, SECOND).await;
        assert!(began.elapsed() < SECOND, "{:?}", began.elapsed());
    }
    sim.api.edit("secrets", "default", "shown", |object| object["data"]["k"] = json!("Mg==")).unwrap();
    wait_content(&file(&sim, &uid, "secret", "s"), "2", SECOND).await;
    let part = sim.root_dir().join(format!("pods/{uid}/volume-subpaths/v/c-updated/3"));
    assert_eq!(std::fs::read_to_string(part).unwrap(), "1", "a subPath keeps the file of its start");
    let newest = sim.runtime.newest(&uid, "c-updated").unwrap();
    assert!(newest.running() && newest.id() == first);
    // A key that goes away, and an object that goes away.
    sim.api.edit("configmaps", "default", "shown", |object| object["data"] = json!({"other": "5"})).unwrap();
    wait_content(&file(&sim, &uid, "configmap", "v").with_file_name("other"), "5", SECOND).await;
    assert!(!file(&sim, &uid, "configmap", "v").exists());
    sim.api.delete("configmaps", "default", "shown", None).unwrap();
    until("an event of the failed refresh", LONG, async || {
        let warnings = sim.warnings("updated");
        let text = "configmap \"shown\" not found";
        if warnings.iter().any(|w| w.message.contains(text)) { Ok(()) } else { Err(warnings) }
    })
    .await;
    wait_content(&file(&sim, &uid, "configmap", "v").with_file_name("other"), "5", SECOND).await;
    assert_eq!(requests(&sim, "configmaps"), [0, 1, 1]);
    assert_eq!(requests(&sim, "secrets"), [0, 1, 1]);
    sim.delete("updated", Some(0));
    sim.wait_gone("updated").await;
    sim.wait_nothing_left(&uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_pods_with_the_root_certificate_cost_one_list_and_one_watch() {
    const PODS: usize = 100;
    let sim = start(&[NO_SYNC]).await;
    let root = "kube-root-ca.crt";
    sim.api.edit("configmaps", "default", root, |object| object["data"] = json!({"k": "1"})).unwrap();
    let mut uids = Vec::new();
    for number in 0..PODS {
        let mut pod = with_config_map(&format!("burst-{number}"), "");
        pod["spec"]["volumes"] = json!([
            {"name": "v", "projected": {"sources": [{"configMap": {"name": root}}]}},
        ]);
        uids.push(sim.create(pod));
    }
    for number in 0..PODS {
        sim.wait_ready(&format!("burst-{number}")).await;
    }
    assert_eq!(requests(&sim, "configmaps"), [0, 1, 1]);
    write(&sim, root, "2");
    for uid in &uids {
        wait_content(&file(&sim, uid, "projected", "v"), "2", LONG).await;
    }
    assert_eq!(requests(&sim, "configmaps"), [0, 1, 1]);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_survive_an_api_server_that_goes_away_and_one_that_lost_its_history() {
    let sim = start(&[NO_SYNC]).await;
    config_map(&sim, "shown", "1");
    config_map(&sim, "fixed", "1");
    sim.api.edit("configmaps", "default", "fixed", |object| object["immutable"] = json!(true)).unwrap();
    let shown = sim.create(with_config_map("shows", "shown"));
    let _fixed = sim.create(with_config_map("shows-fixed", "fixed"));
    sim.wait_ready("shows").await;
    sim.wait_ready("shows-fixed").await;
    // A watch begins after its list, and that of the immutable object only if no pod has read the object
    // before.
    let [gets, lists, watches] = requests(&sim, "configmaps");
    assert_eq!([gets, lists], [0, 2]);
    assert!(watches <= 2, "{watches} watches");
    let path = file(&sim, &shown, "configmap", "v");
    // The watches end, the connections break, the server is away, the history is lost.
    sim.api.faults().drop_watches();
    write(&sim, "shown", "2");
    wait_content(&path, "2", LONG).await;
    sim.api.faults().set_down(true);
    write(&sim, "shown", "3");
    tokio::time::sleep(Duration::from_secs(2)).await;
    sim.api.faults().set_down(false);
    wait_content(&path, "3", LONG).await;
    sim.api.expire();
    write(&sim, "shown", "4");
    wait_content(&path, "4", LONG).await;
    let all = sim.api.requests("* configmaps");
    assert!(all.iter().all(|request| request.verb != "get"), "{all:?}");
    assert_eq!(requests(&sim, "configmaps")[1], 3, "an immutable object is not listed again");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_pod_sync_reads_what_changed_while_none_ran_and_while_the_api_server_was_away() {
    let sim = start(&[NO_SYNC]).await;
    config_map(&sim, "shown", "1");
    let uid = sim.create(with_config_map("restarts", "shown"));
    sim.wait_ready("restarts").await;
    let path = file(&sim, &uid, "configmap", "v");
    sim.kill(Service::PodSync).await;
    write(&sim, "shown", "2");
    sim.up(Service::PodSync);
    wait_content(&path, "2", LONG).await;
    sim.kill(Service::PodSync).await;
    write(&sim, "shown", "3");
    sim.api.faults().set_down(true);
    sim.up(Service::PodSync);
    // Its first refresh fails, and the next one would come in an hour.
    tokio::time::sleep(Duration::from_secs(3)).await;
    wait_content(&path, "2", SECOND).await;
    sim.api.faults().set_down(false);
    wait_content(&path, "3", LONG).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_starts_without_the_api_server_has_the_known_services_or_waits_for_their_list() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&[NO_SYNC]);
    let service =
        json!({"metadata": {"name": "db"}, "spec": {"clusterIP": "10.9.8.7", "ports": [{"port": 5432}]}});
    sim.api.create("services", "default", service).unwrap();
    sim.start_all();
    let mut pod = pods::single("web");
    pod["spec"]["enableServiceLinks"] = json!(true);
    let uid = sim.create(pod);
    sim.wait_ready("web").await;
    let mut last = sim.runtime.newest(&uid, "c-web").unwrap();
    for is_known in [true, false] {
        sim.kill(Service::PodSync).await;
        sim.api.faults().set_down(true);
        assert!(sim.runtime.exit(last.id(), 1));
        if !is_known {
            std::fs::remove_file(sim.paths().state_dir().join(".services")).unwrap();
        }
        sim.up(Service::PodSync);
        tokio::time::sleep(Duration::from_mins(2)).await;
        let newest = sim.runtime.newest(&uid, "c-web").unwrap();
        assert_eq!(newest.id() != last.id(), is_known);
        sim.api.faults().set_down(false);
        let restarts = if is_known { 1 } else { 2 };
        let is_up = |pod: &Seen| pod.is_ready() && pod.restarts() == restarts;
        sim.wait_pod("web", "Ready again", is_up).await;
        last = sim.runtime.newest(&uid, "c-web").unwrap();
        let host = last.config.envs.iter().find(|env| env.key == "DB_SERVICE_HOST");
        assert_eq!(host.map(|env| env.value.as_slice()), Some(b"10.9.8.7".as_slice()), "known: {is_known}");
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_are_read_at_each_sync_by_get_and_after_their_time_to_live_by_cache() {
    for strategy in ["Get", "Cache"] {
        let flag = format!("--config-map-and-secret-change-detection-strategy={strategy}");
        let sim = start(&["--sync-frequency=1s", &flag]).await;
        config_map(&sim, "shown", "1");
        let uid = sim.create(with_config_map("reads", "shown"));
        sim.wait_ready("reads").await;
        let path = file(&sim, &uid, "configmap", "v");
        write(&sim, "shown", "2");
        if strategy == "Cache" {
            // Seven refreshes later the minute has not passed.
            tokio::time::sleep(Duration::from_secs(8)).await;
            wait_content(&path, "1", SECOND).await;
            let ttl = |node: &mut Value| {
                node["metadata"]["annotations"]["node.alpha.kubernetes.io/ttl"] = json!("0")
            };
            assert_eq!(requests(&sim, "configmaps")[0], 1, "one request");
            sim.api.edit("nodes", "", NODE, ttl).unwrap();
        }
        wait_content(&path, "2", LONG).await;
        let [gets, lists, watches] = requests(&sim, "configmaps");
        assert!(gets > 1 && lists == 0 && watches == 0, "{strategy}: {gets} {lists} {watches}");
        sim.finish().await;
    }
}

/// Reads keys `k` and `other` of one version of a volume; none if that version was removed meanwhile.
fn read_version(volume: &Path) -> Option<(u32, u32)> {
    let version = volume.join(std::fs::read_link(volume.join("..data")).ok()?);
    let key = |name: &str| std::fs::read_to_string(version.join(name)).ok()?.parse().ok();
    Some((key("k")?, key("other")?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_of_a_thousand_updates_never_sees_a_mixed_or_an_older_version() {
    const UPDATES: u32 = 1000;
    let sim = start(&[NO_SYNC]).await;
    let object = json!({"metadata": {"name": "counts"}, "data": {"k": "0", "other": "0"}});
    sim.api.create("configmaps", "default", object).unwrap();
    let uid = sim.create(with_config_map("reader", "counts"));
    sim.wait_ready("reader").await;
    let volume = file(&sim, &uid, "configmap", "v").with_file_name("");
    let reader = std::thread::spawn(move || {
        let (mut seen, began) = (vec![0], Instant::now());
        while *seen.last().unwrap() < UPDATES && began.elapsed() < LONG {
            let Some((one, other)) = read_version(&volume) else { continue };
            assert_eq!(one, other, "a mixed version");
            let last = *seen.last().unwrap();
            assert!(one >= last, "{one} after {last}");
            if one > last {
                seen.push(one);
            }
        }
        seen
    });
    for update in 1..=UPDATES {
        let value = json!(update.to_string());
        let change = |object: &mut Value| object["data"] = json!({"k": value, "other": value});
        sim.api.edit("configmaps", "default", "counts", change).unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let seen = task::blocking(move || reader.join().unwrap()).await;
    assert_eq!(seen.last(), Some(&UPDATES));
    assert!(seen.len() > 5, "{seen:?}");
    assert_eq!(requests(&sim, "configmaps"), [0, 1, 1]);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_config_map_that_appears_ends_the_back_off_of_the_pods_that_wait_for_it() {
    let sim = start(&[NO_SYNC]).await;
    let _uid = sim.create(with_config_map("late", "late"));
    // After the fifth failure the pod waits for 8 s.
    sim.wait_event("late", "five failures", |e| e.reason == "FailedMount" && e.count >= 5).await;
    let began = Instant::now();
    config_map(&sim, "late", "1");
    sim.wait_ready("late").await;
    assert!(began.elapsed() < 4 * SECOND, "{:?}", began.elapsed());
    sim.finish().await;
}

/// Returns state and last error of each volume that `quintctl volumes` lists, by the name in its pod.
async fn listed(sim: &Sim) -> Result<Vec<(String, VolumeState, String)>, String> {
    let mut client = VolumesClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    let reply = whole(client.list(ListVolumesRequest {})).await.map_err(|error| error.to_string())?;
    let volumes = reply.into_inner().volumes.into_iter();
    Ok(volumes.map(|volume| (volume.name.clone(), volume.state(), volume.error)).collect())
}

async fn wait_listed(sim: &Sim, wanted: &[(&str, VolumeState, &str)]) {
    until("the volumes are listed", LONG, async || {
        let listed = listed(sim).await?;
        let all = listed.iter().map(|(name, state, error)| (name.as_str(), *state, error.as_str()));
        if all.eq(wanted.iter().copied()) { Ok(()) } else { Err(format!("{listed:?}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_config_map_that_is_missing_fails_alone_and_each_volume_of_the_pod_is_listed() {
    use VolumeState::{Mounted, NotMounted};
    let sim = start(&[NO_SYNC]).await;
    config_map(&sim, "there", "1");
    let made = sim.root_dir().with_file_name("made");
    let mut pod = with_config_map("waits", "missing");
    pod["spec"]["volumes"].as_array_mut().unwrap().extend([
        json!({"name": "other", "configMap": {"name": "there"}}),
        json!({"name": "made", "hostPath": {"path": made, "type": "DirectoryOrCreate"}}),
        json!({"name": "scratch", "emptyDir": {"medium": "Memory"}}),
        json!({"name": "unused", "emptyDir": {}}),
    ]);
    let at = |name: &str| json!({"name": name, "mountPath": format!("/{name}")});
    pod["spec"]["containers"][0]["volumeMounts"] = json!([at("v"), at("other"), at("made"), at("scratch")]);
    let uid = sim.create(pod);
    sim.wait_event("waits", "a failure", |e| e.reason == "FailedMount").await;
    until("the directory is made", LONG, async || if made.exists() { Ok(()) } else { Err(()) }).await;
    std::fs::remove_dir(&made).unwrap();
    let text = "MountVolume.SetUp failed for volume \"v\" : configmap \"missing\" not found";
    sim.wait_event("waits", "four failures", |e| e.message == text && e.count >= 4).await;
    assert!(!made.exists(), "a volume that is set up does not take part in the retries of another one");
    let waits =
        [("made", Mounted, ""), ("other", Mounted, ""), ("scratch", Mounted, ""), ("v", NotMounted, text)];
    wait_listed(&sim, &waits).await;
    let mut client = PodSyncClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    let explained = client.explain(ExplainRequest { pod: "default/waits".to_owned() }).await.unwrap();
    let explained = explained.into_inner();
    let error = "unmounted volumes=[v], unattached volumes=[], failed to process volumes=[]: context deadline exceeded";
    assert!(explained.last_errors.iter().any(|last| last.contains(error)), "{:?}", explained.last_errors);
    let waiting = format!("{:?}", explained.pod.unwrap().waiting);
    assert!(waiting.contains("configmap \\\"missing\\\" not found"), "{waiting}");
    assert_eq!(explained.volumes.len(), 4);

    config_map(&sim, "missing", "1");
    sim.wait_ready("waits").await;
    let all = [("made", Mounted, ""), ("other", Mounted, ""), ("scratch", Mounted, ""), ("v", Mounted, "")];
    wait_listed(&sim, &all).await;
    let container = || sim.runtime.newest(&uid, "c-waits").unwrap().id().to_owned();
    let first = container();
    // The next process finds the directories, and its worker confirms the volumes.
    sim.kill(Service::PodSync).await;
    sim.up(Service::PodSync);
    wait_listed(&sim, &all).await;
    assert_eq!(container(), first);
    sim.delete("waits", Some(0));
    sim.wait_gone("waits").await;
    sim.wait_nothing_left(&uid).await;
    wait_listed(&sim, &[]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_pending_and_a_config_map_that_is_missing_are_both_events_of_the_pod() {
    let sim = start(&[NO_SYNC]).await;
    let claim = json!({"metadata": {"name": "pending"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
    sim.api.create("persistentvolumeclaims", "default", claim).unwrap();
    let mut pod = with_config_map("waits", "missing");
    let volume = json!({"name": "data", "persistentVolumeClaim": {"claimName": "pending"}});
    pod["spec"]["volumes"].as_array_mut().unwrap().push(volume);
    let mount = json!({"name": "data", "mountPath": "/data"});
    pod["spec"]["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(mount);
    let uid = sim.create(pod);
    let text = "MountVolume.SetUp failed for volume \"v\" : configmap \"missing\" not found";
    sim.wait_event("waits", text, |e| e.reason == "FailedMount" && e.message == text).await;
    let text = "Unable to attach or mount volumes: unmounted volumes=[data v], unattached volumes=[], \
                failed to process volumes=[data]: ";
    sim.wait_event("waits", text, |e| e.reason == "FailedMount" && e.message.starts_with(text)).await;
    sim.delete("waits", Some(0));
    sim.wait_gone("waits").await;
    sim.wait_nothing_left(&uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_config_map_among_the_manifests_reaches_the_files_of_its_static_pod() {
    let sim = start(&[NO_SYNC, "--file-check-frequency=1h"]).await;
    let object = |value: &str| {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "default"},
            "data": {"k": value}})
    };
    let mut pod = pods::manifest("web");
    pod["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "c", "defaultMode": 420}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    sim.manifest("web", &pod);
    sim.wait_runtime("the pod waits for its ConfigMap", |_| !sim.warnings(&format!("web-{NODE}")).is_empty())
        .await;
    sim.manifest("config", &object("1"));
    sim.wait_runtime("the pod runs", |runtime| !runtime.containers().is_empty()).await;
    let uid = sim.runtime.containers()[0].pod_uid().to_owned();
    let path = file(&sim, &uid, "configmap", "v");
    wait_content(&path, "1", SECOND).await;
    for value in ["2", "3"] {
        sim.manifest("config", &object(value));
        wait_content(&path, value, 5 * SECOND).await;
    }
    sim.remove_manifest("web");
    sim.wait_nothing_left(&uid).await;
    sim.finish().await;
}

/// Returns a pod with a projected volume `v` of one source, whose file is `k`.
fn with_projection(pod: &str, source: &Value) -> Value {
    let mut pod = with_config_map(pod, "");
    pod["spec"]["volumes"] = json!([{"name": "v", "projected": {"sources": [source]}}]);
    pod
}

fn trust_bundle(sim: &Sim, name: &str, certificate: &str) {
    let bundle = format!("-----BEGIN CERTIFICATE-----\n{certificate}\n-----END CERTIFICATE-----\n");
    let object = json!({
        "metadata": {"name": format!("example.com.{name}"), "labels": {"name": name}},
        "spec": {"signerName": "example.com/s", "trustBundle": bundle},
    });
    sim.api.create("clustertrustbundles", "", object).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_of_trust_bundles_reach_the_files_of_pods_with_the_feature_gate() {
    let sim = start(&["--sync-frequency=1s"]).await;
    let block =
        |content: &str| format!("-----BEGIN CERTIFICATE-----\n{content}\n-----END CERTIFICATE-----\n");
    assert_eq!(requests(&sim, "clustertrustbundles"), [0, 0, 0]);
    trust_bundle(&sim, "one", "YQ==");
    let by_name = json!({"clusterTrustBundle": {"path": "k", "name": "example.com.one"}});
    let selector = json!({"matchLabels": {"name": "two"}});
    let by_signer = json!({"clusterTrustBundle": {"path": "k", "signerName": "example.com/s", "labelSelector": selector}});
    let mut optional = by_signer.clone();
    optional["clusterTrustBundle"]["optional"] = json!(true);
    let named = sim.create(with_projection("named", &by_name));
    let empty = sim.create(with_projection("empty", &optional));
    let late = sim.create(with_projection("late", &by_signer));
    sim.wait_ready("named").await;
    sim.wait_ready("empty").await;
    wait_content(&file(&sim, &named, "projected", "v"), &block("YQ=="), LONG).await;
    wait_content(&file(&sim, &empty, "projected", "v"), "", LONG).await;
    let text = "MountVolume.SetUp failed for volume \"v\" : \
                combination of signerName and labelSelector matched zero ClusterTrustBundles";
    sim.wait_event("late", text, |e| e.reason == "FailedMount" && e.message == text).await;
    trust_bundle(&sim, "two", "Yg==");
    sim.wait_ready("late").await;
    wait_content(&file(&sim, &late, "projected", "v"), &block("Yg=="), LONG).await;
    wait_content(&file(&sim, &empty, "projected", "v"), &block("Yg=="), LONG).await;
    sim.api
        .edit("clustertrustbundles", "", "example.com.one", |object| {
            object["spec"]["trustBundle"] = json!(format!("{}{}", block("Yw=="), block("Yw==")));
        })
        .unwrap();
    wait_content(&file(&sim, &named, "projected", "v"), &block("Yw=="), LONG).await;
    assert_eq!(requests(&sim, "clustertrustbundles"), [0, 1, 1]);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_feature_gate_a_trust_bundle_is_an_event_and_no_request() {
    let sim = start(&["--feature-gates=ClusterTrustBundle=false,ClusterTrustBundleProjection=false"]).await;
    trust_bundle(&sim, "one", "YQ==");
    let source = json!({"clusterTrustBundle": {"path": "k", "name": "example.com.one"}});
    let _named = sim.create(with_projection("named", &source));
    let text = "MountVolume.SetUp failed for volume \"v\" : \
                ClusterTrustBundle projection is not supported in static kubelet mode";
    sim.wait_event("named", text, |e| e.reason == "FailedMount" && e.message == text).await;
    assert_eq!(requests(&sim, "clustertrustbundles"), [0, 0, 0]);
    sim.finish().await;
}
