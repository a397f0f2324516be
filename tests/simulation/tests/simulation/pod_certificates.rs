//! Certificates of pods in projected volumes (`podCertificate`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use jiff::{SignedDuration, Timestamp};
use quintlet_kit::task;
use quintlet_simulation::{LONG, NODE, Options, Service, Sim, pods};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

const PLURAL: &str = "podcertificaterequests";
const NO_SYNC: &str = "--sync-frequency=1h";
const HOUR: SignedDuration = SignedDuration::from_hours(1);

/// Starts a node with the permissions of a node.
async fn start(args: &[&str]) -> Sim {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.api.node_kubeconfig(&sim.root_dir().with_file_name("kubeconfig"), NODE).unwrap();
    sim.set_pod_sync_args(args);
    sim.start_all();
    sim
}

fn with_certificate(name: &str) -> Value {
    let mut pod = pods::single(name);
    let source = json!({"podCertificate": {
        "signerName": "example.com/s", "keyType": "ECDSAP256", "credentialBundlePath": "bundle",
        "keyPath": "d/key", "certificateChainPath": "d/chain",
    }});
    pod["spec"]["volumes"] = json!([{"name": "v", "projected": {"sources": [source]}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    pod
}

/// Waits for the only request that is not in `known`, and returns its name.
async fn request(sim: &Sim, known: &[&str]) -> String {
    until("a new request", LONG, async || {
        let names = sim.api.list(PLURAL).into_iter();
        let names = names.map(|request| request["metadata"]["name"].as_str().unwrap().to_owned());
        let mut new: Vec<String> = names.filter(|name| !known.contains(&name.as_str())).collect();
        if new.len() == 1 { Ok(new.remove(0)) } else { Err(new) }
    })
    .await
}

fn answer(sim: &Sim, request: &str, kind: &str, message: &str, more: &Value) {
    let mut status = json!({"conditions": [{"type": kind, "status": "True", "reason": "Because",
        "message": message, "lastTransitionTime": Timestamp::now()}]});
    status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let change = |object: &mut Value| object["status"] = status.clone();
    sim.api.edit(&format!("{PLURAL}/status"), "default", request, change).unwrap();
}

/// Issues a certificate whose content names the request. Its refresh begins in `refresh`.
fn issue(sim: &Sim, request: &str, refresh: SignedDuration) {
    let now = Timestamp::now();
    let more = json!({"certificateChain": chain(request), "notBefore": now - HOUR * 2,
        "beginRefreshAt": now + refresh, "notAfter": now + HOUR * 24});
    answer(sim, request, "Issued", "", &more);
}

/// Returns a block whose content is the name of a request, made to valid Base64.
fn chain(request: &str) -> String {
    let mut content: String = request.replace('-', "+");
    while !content.len().is_multiple_of(4) {
        content.push('A');
    }
    format!("-----BEGIN CERTIFICATE-----\n{content}\n-----END CERTIFICATE-----\n")
}

fn volume(sim: &Sim, uid: &str) -> PathBuf {
    sim.root_dir().join(format!("pods/{uid}/volumes/kubernetes.io~projected/v"))
}

/// Returns the key and the chain of one version of the files.
fn version(volume: &Path) -> Option<(String, String)> {
    let data = volume.join(std::fs::read_link(volume.join("..data")).ok()?);
    let read = |path: &str| std::fs::read_to_string(data.join(path)).ok();
    let bundle = read("bundle")?;
    let key = read("d/key")?;
    let chain = read("d/chain")?;
    assert_eq!(bundle, format!("{key}{chain}"), "the files of one version are of one key");
    assert!(key.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    Some((key, chain))
}

async fn wait_chain(volume: &Path, expected: &str) -> String {
    until(&format!("the chain {expected}"), LONG, async || match version(volume) {
        Some((key, chain)) if chain == expected => Ok(key),
        other => Err(other.map(|(_, chain)| chain)),
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_runs_once_its_certificate_is_issued_and_each_refresh_replaces_all_files_together() {
    let sim = start(&[NO_SYNC]).await;
    let uid = sim.create(with_certificate("web"));
    let mut known = vec![request(&sim, &[]).await];
    let text = "MountVolume.SetUp failed for volume \"v\" : credential bundle is not issued yet";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    assert!(sim.runtime.containers().is_empty());
    let volume = volume(&sim, &uid);
    issue(&sim, &known[0], HOUR * -1);
    sim.wait_ready("web").await;
    // Each certificate but the last is to be refreshed at once.
    let refreshes = 4;
    let reader = {
        let volume = volume.clone();
        std::thread::spawn(move || {
            let mut seen = BTreeSet::new();
            let deadline = std::time::Instant::now() + LONG;
            while seen.len() <= refreshes && std::time::Instant::now() < deadline {
                seen.extend(version(&volume));
            }
            seen
        })
    };
    for number in 1..=refreshes {
        let names: Vec<&str> = known.iter().map(String::as_str).collect();
        let next = request(&sim, &names).await;
        issue(&sim, &next, if number == refreshes { HOUR } else { HOUR * -1 });
        wait_chain(&volume, &chain(&next)).await;
        known.push(next);
    }
    let seen = task::blocking(move || reader.join().unwrap()).await;
    let keys: BTreeSet<&String> = seen.iter().map(|(key, _)| key).collect();
    let chains: BTreeSet<&String> = seen.iter().map(|(_, chain)| chain).collect();
    assert_eq!([seen.len(), keys.len(), chains.len()], [refreshes + 1; 3], "{chains:?}");
    assert_eq!(
        chains.into_iter().cloned().collect::<BTreeSet<_>>(),
        known.iter().map(|name| chain(name)).collect()
    );
    let container = sim.runtime.newest(&uid, "c-web").unwrap();
    assert!(container.running() && container.config.metadata.as_ref().unwrap().attempt == 0);
    let log = serde_json::to_string(&sim.lines()).unwrap();
    assert!(keys.iter().all(|key| !log.contains(key.lines().nth(1).unwrap())));
    sim.delete("web", Some(1));
    sim.wait_gone("web").await;
    sim.wait_nothing_left(&uid).await;
    assert_eq!(sim.api.list(PLURAL).len(), refreshes + 1);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_request_is_denied_waits_with_the_signers_reason() {
    let sim = start(&[NO_SYNC]).await;
    let uid = sim.create(with_certificate("web"));
    let name = request(&sim, &[]).await;
    answer(&sim, &name, "Denied", "use ED25519", &json!({}));
    let denied = format!(
        "PodCertificateRequest default/{name} was denied, reason=\"Because\", message=\"use ED25519\""
    );
    sim.wait_event("web", &denied, |e| e.reason == "Denied" && e.message == denied).await;
    let text = "MountVolume.SetUp failed for volume \"v\" : \
                PodCertificateRequest was permanently denied: reason=\"Because\" message=\"use ED25519\"";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    let seen = sim.wait_pod("web", "Pending", |pod| pod.phase() == "Pending").await;
    assert_eq!(seen.phase(), "Pending");
    assert!(sim.runtime.containers().is_empty());
    assert_eq!(sim.api.list(PLURAL).len(), 1);
    sim.delete("web", Some(1));
    sim.wait_gone("web").await;
    sim.wait_nothing_left(&uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_pod_sync_requests_another_certificate_and_keeps_the_files_until_it_is_issued() {
    let sim = start(&[NO_SYNC]).await;
    let uid = sim.create(with_certificate("web"));
    // The key of this request is lost with the process.
    let lost = request(&sim, &[]).await;
    sim.restart(Service::PodSync).await;
    let first = request(&sim, &[&lost]).await;
    issue(&sim, &lost, HOUR);
    issue(&sim, &first, HOUR);
    sim.wait_ready("web").await;
    let volume = volume(&sim, &uid);
    let key = wait_chain(&volume, &chain(&first)).await;
    sim.restart(Service::PodSync).await;
    let second = request(&sim, &[&lost, &first]).await;
    let text = "MountVolume.SetUp failed for volume \"v\" : credential bundle is not issued yet";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    assert_eq!(version(&volume), Some((key.clone(), chain(&first))));
    issue(&sim, &second, HOUR);
    assert_ne!(wait_chain(&volume, &chain(&second)).await, key);
    let container = sim.runtime.newest(&uid, "c-web").unwrap();
    assert!(container.running() && container.config.metadata.as_ref().unwrap().attempt == 0);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_feature_gate_a_pod_certificate_is_an_event_and_no_request() {
    let sim = start(&["--feature-gates=PodCertificateRequest=false"]).await;
    let _uid = sim.create(with_certificate("web"));
    let text = "MountVolume.SetUp failed for volume \"v\" : unimplemented";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    for verb in ["create", "list", "watch"] {
        assert_eq!(sim.api.counts().of(format!("{verb} {PLURAL}").as_str()), 0);
    }
    sim.finish().await;
}
