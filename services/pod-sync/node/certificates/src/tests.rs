//! The managers with the test API server and a signer. The wall clock is moved by hand.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::{Api, WatchEvent, WatchParams};
use quintlet_kit::clock::Clock;
use quintlet_kit::task;
use quintlet_testapi::{SignerAnswer, TestApi, TestSigner};
use quintlet_testkit::http_server::HttpServer;
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::decide::{CertificateFacts, CertificatePurpose, KubeconfigCredential, WantedCertificate};
use crate::key::{NodeKey, facts_of};
use crate::manager::Timing;
use crate::store::CertificateStore;
use crate::{ClientCertificate, NodeClient, ServingCertificate, credential_of};

const LONG: Duration = Duration::from_secs(20);
const PLURAL: &str = "certificatesigningrequests";
const MINUTE: Duration = Duration::from_secs(60);

/// Waits of the tests: the wall clock is fixed, so that each decision is a poll.
const TIMING: Timing = Timing {
    first_retry: Duration::from_millis(20),
    last_retry: Duration::from_millis(40),
    check_period: Duration::from_millis(20),
    answer_limit: LONG,
    share: Some(0.8),
};

/// Returns a certificate of a key with the subject and names, valid from 2026 to 2030.
pub(crate) fn self_signed(key: &NodeKey, wanted: &WantedCertificate) -> String {
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::OrganizationName, wanted.organization());
    params.distinguished_name.push(rcgen::DnType::CommonName, wanted.common_name.as_str());
    params.not_before = rcgen::date_time_ymd(2026, 1, 1);
    params.not_after = rcgen::date_time_ymd(2030, 1, 1);
    params.self_signed(&rcgen::KeyPair::from_pem(key.expose()).unwrap()).unwrap().pem()
}

struct Fixture {
    api: TestApi,
    signer: TestSigner,
    clock: Clock,
    dir: tempfile::TempDir,
    log: quintlet_testkit::logs::Lines,
    _log: tracing::subscriber::DefaultGuard,
}

/// A running manager.
struct Running {
    stop: CancellationToken,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    client: NodeClient,
}

impl Running {
    async fn end(self) {
        self.stop.cancel();
        for running in self.tasks {
            running.await.unwrap();
        }
    }
}

impl Fixture {
    async fn new() -> Self {
        let log = quintlet_testkit::logs::Lines::default();
        let capture = quintlet_testkit::logs::capture("test", tracing::Level::WARN, &log);
        let guard = tracing::dispatcher::set_default(&capture);
        let fixture = Self {
            api: TestApi::start().await,
            signer: TestSigner::new(),
            clock: Clock::fixed("2026-11-23T10:00:00Z".parse().unwrap(), Duration::ZERO),
            dir: tempfile::tempdir().unwrap(),
            log,
            _log: guard,
        };
        fixture.api.kubeconfig(&fixture.path("bootstrap.conf")).unwrap();
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn kubeconfig(&self) -> PathBuf {
        self.path("kubelet.conf")
    }

    fn store(&self, purpose: CertificatePurpose) -> CertificateStore {
        CertificateStore::new(&self.path("pki"), purpose)
    }

    async fn start(&self, has_bootstrap: bool, rotates: bool) -> Running {
        self.start_with(has_bootstrap, rotates, TIMING).await
    }

    async fn start_with(&self, has_bootstrap: bool, rotates: bool, timing: Timing) -> Running {
        let path = self.kubeconfig();
        let client = match has_bootstrap {
            true => NodeClient::awaiting(&path),
            false => NodeClient::open(&path).await.unwrap(),
        };
        let manager =
            ClientCertificate::new("n1", client.clone(), &self.path("pki"), &path, self.clock.clone())
                .with_bootstrap(has_bootstrap.then(|| self.path("bootstrap.conf")))
                .with_rotation(rotates)
                .with_timing(timing);
        let stop = CancellationToken::new();
        let tasks = vec![
            task::spawn("client-certificate", manager.run(stop.clone())),
            task::spawn("kubeconfig", client.clone().follow(stop.clone())),
        ];
        Running { stop, tasks, client }
    }

    /// Waits for a number of requests so far, and returns them, oldest first.
    async fn requests(&self, count: usize) -> Vec<Value> {
        until(&format!("{count} requests"), LONG, async || {
            let mut all = self.api.list(PLURAL);
            all.sort_by_key(|request| {
                request["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap()
            });
            if all.len() == count { Ok(all) } else { Err((all.len(), self.warnings())) }
        })
        .await
    }

    /// Answers requests until `wanted` holds of the certificate in use.
    async fn answer_until(
        &self,
        purpose: CertificatePurpose,
        life: Duration,
        wanted: impl Fn(&CertificateFacts) -> bool,
    ) -> CertificateFacts {
        until("the certificate in use", LONG, async || {
            self.signer.answer_all(&self.api, self.clock.wall(), life);
            match self.store(purpose).current() {
                Ok(Some(facts)) if wanted(&facts) => Ok(facts),
                other => Err(format!("{other:?}")),
            }
        })
        .await
    }

    async fn bootstrapped(&self, life: Duration) -> CertificateFacts {
        let facts = self.answer_until(CertificatePurpose::Client, life, |_| true).await;
        self.wait_kubeconfig(&facts).await;
        facts
    }

    async fn wait_kubeconfig(&self, facts: &CertificateFacts) {
        until("the kubeconfig", LONG, async || match credential_of(&self.kubeconfig()) {
            KubeconfigCredential::Certificate(found) if *found == *facts => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await;
    }

    /// Returns the messages and errors of lines at WARN and above.
    fn warnings(&self) -> Vec<String> {
        let lines = self.log.all();
        let read = |line: &String| -> Value { serde_json::from_str(line).unwrap() };
        let text = |line: &Value| {
            let part = |field: &str| line[field].as_str().unwrap_or_default().to_owned();
            format!("{}: {}{}", part("msg"), part("error"), part("reason"))
        };
        lines.iter().map(read).map(|line| text(&line)).collect()
    }
}

async fn names(client: &kube::Client) -> Vec<String> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    let list = maps.list(&kube::api::ListParams::default()).await.unwrap();
    list.items.into_iter().filter_map(|map| map.metadata.name).collect()
}

#[tokio::test]
async fn a_node_without_a_kubeconfig_requests_its_certificate_with_the_bootstrap_credential() {
    for rotates in [false, true] {
        let fixture = Fixture::new().await;
        let running = fixture.start(true, rotates).await;
        let client = running.client.client();
        let early = task::spawn("early request", async move { names(&client).await });
        let request = fixture.requests(1).await.remove(0);
        assert!(request["metadata"]["name"].as_str().unwrap().starts_with("node-csr-"));
        assert_eq!(request["spec"]["signerName"], "kubernetes.io/kube-apiserver-client-kubelet");
        assert_eq!(request["spec"]["usages"], json!(["digital signature", "client auth"]));
        let store = fixture.store(CertificatePurpose::Client);
        assert!(store.pending_key_path().exists() && !fixture.kubeconfig().exists());
        let facts = fixture.bootstrapped(MINUTE * 60).await;
        assert_eq!(facts.common_name, "system:node:n1");
        // A request from before the end of the bootstrap has waited for it.
        assert_eq!(early.await.unwrap(), ["kube-root-ca.crt"]);
        until(
            "the key is removed",
            LONG,
            async || {
                if store.pending_key_path().exists() { Err(()) } else { Ok(()) }
            },
        )
        .await;
        assert_eq!(fixture.warnings(), [""; 0]);
        running.end().await;
        // The next start finds everything.
        let running = fixture.start(true, rotates).await;
        assert_eq!(names(&running.client.client()).await, ["kube-root-ca.crt"]);
        tokio::time::sleep(TIMING.check_period * 4).await;
        assert_eq!(fixture.api.list(PLURAL).len(), 1);
        running.end().await;
    }
}

#[tokio::test]
async fn a_restart_during_a_bootstrap_continues_with_the_same_key_and_request() {
    let fixture = Fixture::new().await;
    let running = fixture.start(true, true).await;
    let first = fixture.requests(1).await;
    running.end().await;
    let running = fixture.start(true, true).await;
    tokio::time::sleep(TIMING.check_period * 4).await;
    let facts = fixture.bootstrapped(MINUTE * 60).await;
    assert_eq!(fixture.requests(1).await[0]["metadata"]["uid"], first[0]["metadata"]["uid"]);
    running.end().await;
    // A kill before the kubeconfig was written, with the key still there.
    std::fs::remove_file(fixture.kubeconfig()).unwrap();
    let store = fixture.store(CertificatePurpose::Client);
    store.pending_key().unwrap();
    let running = fixture.start(true, true).await;
    fixture.wait_kubeconfig(&facts).await;
    until(
        "the key is removed",
        LONG,
        async || {
            if store.pending_key_path().exists() { Err(()) } else { Ok(()) }
        },
    )
    .await;
    assert_eq!(fixture.api.list(PLURAL).len(), 1, "the stored certificate is used");
    running.end().await;
}

#[tokio::test]
async fn each_refused_or_wrong_certificate_is_one_line_and_another_key() {
    let fixture = Fixture::new().await;
    fixture.signer.script(&[
        SignerAnswer::Deny,
        SignerAnswer::Deny,
        SignerAnswer::Fail,
        SignerAnswer::WrongName,
        SignerAnswer::WrongKey,
        SignerAnswer::Rubbish,
    ]);
    let running = fixture.start(true, false).await;
    fixture.bootstrapped(MINUTE * 60).await;
    let mut names: Vec<Value> =
        fixture.requests(7).await.iter().map(|request| request["metadata"]["name"].clone()).collect();
    names.dedup();
    assert_eq!(names.len(), 7, "another key has another name");
    let line = |text: &str| format!("client certificate was not renewed, retrying: {text}");
    assert_eq!(
        fixture.warnings(),
        [
            line("certificate signing request is denied, reason: Because, message: not today"),
            line("certificate signing request failed, reason: Because, message: not today"),
            line("the issued certificate does not fit: the certificate is for \"system:node:other\""),
            line("the issued certificate is for another key"),
            line("failed to use the issued certificate: there is no certificate"),
        ]
    );
    running.end().await;
}

#[tokio::test]
async fn a_request_that_is_never_signed_is_found_again_and_a_silent_api_server_is_one_line() {
    let fixture = Fixture::new().await;
    fixture.api.faults().set_down(true);
    let timing = Timing { answer_limit: Duration::from_millis(150), ..TIMING };
    let running = fixture.start_with(true, false, timing).await;
    until("a failure", LONG, async || if fixture.warnings().is_empty() { Err(()) } else { Ok(()) }).await;
    fixture.api.faults().set_down(false);
    fixture.requests(1).await;
    until("an unanswered request", LONG, async || {
        let found = fixture.warnings();
        if found.iter().any(|line| line.contains("had no answer within")) { Ok(()) } else { Err(found) }
    })
    .await;
    fixture.bootstrapped(MINUTE * 60).await;
    assert_eq!(fixture.requests(1).await.len(), 1);
    let (silent, unanswered): (Vec<_>, Vec<_>) =
        fixture.warnings().into_iter().partition(|line| line.contains("failed to create the certificate"));
    // On a busy machine more than one limit passes before the signer answers.
    assert!(!silent.is_empty() && !unanswered.is_empty(), "{silent:?} {unanswered:?}");
    running.end().await;
}

#[tokio::test]
async fn a_certificate_is_rotated_three_times_under_a_watch_and_no_request_fails() {
    let fixture = Fixture::new().await;
    let running = fixture.start(true, true).await;
    let mut facts = fixture.bootstrapped(MINUTE).await;
    let client = running.client.client();
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    let mut watched = maps.watch(&WatchParams::default(), "0").await.unwrap().boxed();
    assert!(matches!(watched.next().await, Some(Ok(WatchEvent::Added(_)))));
    let kubeconfig = std::fs::read(fixture.kubeconfig()).unwrap();
    for number in 1..=3 {
        fixture.clock.advance(Duration::from_secs(47));
        tokio::time::sleep(TIMING.check_period * 4).await;
        assert_eq!(fixture.api.list(PLURAL).len(), number, "not before 80 % of the life");
        fixture.clock.advance(Duration::from_secs(2));
        let requests = fixture.requests(number + 1).await;
        assert!(requests[number]["metadata"]["name"].as_str().unwrap().starts_with("csr-"));
        let before = facts.not_after;
        facts =
            fixture.answer_until(CertificatePurpose::Client, MINUTE, |facts| facts.not_after > before).await;
        fixture.wait_kubeconfig(&facts).await;
        let name = format!("m{number}");
        fixture.api.create("configmaps", "default", json!({"metadata": {"name": name}})).unwrap();
        assert!(names(&client).await.contains(&name));
        let Some(Ok(WatchEvent::Added(map))) = watched.next().await else { panic!("the watch ended") };
        assert_eq!(map.metadata.name, Some(name));
    }
    assert_eq!(std::fs::read(fixture.kubeconfig()).unwrap(), kubeconfig, "only the link changes");
    assert_eq!(fixture.warnings(), [""; 0]);
    running.end().await;
}

#[tokio::test]
async fn a_rotation_that_fails_keeps_the_certificate_and_an_expired_one_bootstraps_again() {
    let fixture = Fixture::new().await;
    let running = fixture.start(true, true).await;
    let first = fixture.bootstrapped(MINUTE).await;
    fixture.signer.script(&[SignerAnswer::Stall]);
    fixture.clock.advance(Duration::from_secs(50));
    fixture.requests(2).await;
    fixture.signer.answer_all(&fixture.api, fixture.clock.wall(), MINUTE);
    assert_eq!(fixture.store(CertificatePurpose::Client).current().unwrap(), Some(first));
    running.end().await;
    // The clock steps beyond the end. The credential of the bootstrap is used, and the request is named by
    // its key.
    fixture.clock.advance(MINUTE * 1000);
    let running = fixture.start(true, true).await;
    let requests = fixture.requests(3).await;
    assert!(requests[2]["metadata"]["name"].as_str().unwrap().starts_with("node-csr-"));
    let now = fixture.clock.wall();
    let facts = fixture.answer_until(CertificatePurpose::Client, MINUTE, |facts| facts.not_after > now).await;
    fixture.wait_kubeconfig(&facts).await;
    running.end().await;
}

#[tokio::test]
async fn an_expired_certificate_without_a_bootstrap_kubeconfig_is_one_line() {
    let fixture = Fixture::new().await;
    let running = fixture.start(true, true).await;
    fixture.bootstrapped(MINUTE).await;
    running.end().await;
    fixture.clock.advance(MINUTE * 2);
    let running = fixture.start(false, true).await;
    until("the line", LONG, async || if fixture.warnings().is_empty() { Err(()) } else { Ok(()) }).await;
    tokio::time::sleep(TIMING.last_retry * 4).await;
    let found = fixture.warnings();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("the client certificate expired at 2026-11-23T10:01:00Z"), "{found:?}");
    assert_eq!(fixture.api.list(PLURAL).len(), 1, "an expired certificate requests nothing");
    running.end().await;
}

#[tokio::test]
async fn a_certificate_that_a_kubelet_rotated_replaces_the_expired_one_of_the_kubeconfig() {
    let fixture = Fixture::new().await;
    let running = fixture.start(true, true).await;
    fixture.bootstrapped(MINUTE).await;
    running.end().await;
    let expired = std::fs::read(fixture.path("pki/kubelet-client-current.pem")).unwrap();
    let newer = NodeKey::generate().unwrap();
    let chain = self_signed(&newer, &WantedCertificate::client("n1"));
    let store = fixture.store(CertificatePurpose::Client);
    let facts = store.update(&chain, &newer, fixture.clock.wall() + MINUTE).unwrap();
    let text = std::fs::read_to_string(fixture.kubeconfig()).unwrap();
    std::fs::write(fixture.path("old.pem"), expired).unwrap();
    let current = store.current_path().display().to_string();
    std::fs::write(fixture.kubeconfig(), text.replace(&current, "old.pem")).unwrap();
    fixture.clock.advance(MINUTE * 2);
    let running = fixture.start(false, true).await;
    fixture.wait_kubeconfig(&facts).await;
    assert_eq!(std::fs::read_to_string(fixture.kubeconfig()).unwrap(), text);
    assert_eq!(fixture.api.list(PLURAL).len(), 1, "no request is necessary");
    assert_eq!(fixture.warnings(), [""; 0]);
    running.end().await;
}

#[tokio::test]
async fn a_certificate_in_the_kubeconfig_is_moved_to_the_directory_at_its_rotation() {
    use base64::Engine as _;

    let fixture = Fixture::new().await;
    let key = NodeKey::generate().unwrap();
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let chain = self_signed(&key, &WantedCertificate::client("n1"));
    let text = std::fs::read_to_string(fixture.path("bootstrap.conf")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["users"][0]["user"] =
        json!({"client-certificate-data": encode(&chain), "client-key-data": encode(key.expose())});
    std::fs::write(fixture.kubeconfig(), config.to_string()).unwrap();
    let running = fixture.start(false, true).await;
    tokio::time::sleep(TIMING.check_period * 4).await;
    assert!(fixture.api.list(PLURAL).is_empty());
    fixture.clock.advance(Duration::from_secs(3 * 365 * 24 * 3600));
    let end = facts_of(&chain).unwrap().not_after;
    let facts = fixture
        .answer_until(CertificatePurpose::Client, MINUTE * 2_000_000, |facts| facts.not_after > end)
        .await;
    fixture.wait_kubeconfig(&facts).await;
    let text = std::fs::read_to_string(fixture.kubeconfig()).unwrap();
    assert!(text.contains("kubelet-client-current.pem") && !text.contains("client-key-data"), "{text}");
    assert_eq!(names(&running.client.client()).await, ["kube-root-ca.crt"]);
    running.end().await;
}

fn node(addresses: &[(&str, &str)]) -> Option<Arc<Node>> {
    let addresses: Vec<Value> =
        addresses.iter().map(|(kind, address)| json!({"type": kind, "address": address})).collect();
    let node = json!({"metadata": {"name": "n1"}, "status": {"addresses": addresses}});
    Some(Arc::new(serde_json::from_value(node).unwrap()))
}

#[tokio::test]
async fn the_serving_certificate_follows_the_addresses_of_the_node_and_is_rotated() {
    let fixture = Fixture::new().await;
    let (nodes, watched) = watch::channel(None);
    let manager = ServingCertificate::new(
        "n1",
        watched,
        fixture.api.client(),
        &fixture.path("pki"),
        fixture.clock.clone(),
    );
    let stop = CancellationToken::new();
    let running = task::spawn("serving-certificate", manager.with_timing(TIMING).run(stop.clone()));
    nodes.send_replace(node(&[("Hostname", "n1")]));
    tokio::time::sleep(TIMING.check_period * 4).await;
    assert!(fixture.api.list(PLURAL).is_empty(), "a node without an address requests nothing");
    let one = [("Hostname", "n1"), ("InternalIP", "10.0.0.1")];
    nodes.send_replace(node(&one));
    let request = fixture.requests(1).await.remove(0);
    assert_eq!(request["spec"]["signerName"], "kubernetes.io/kubelet-serving");
    assert_eq!(request["spec"]["usages"], json!(["digital signature", "server auth"]));
    let purpose = CertificatePurpose::Serving;
    let facts = fixture.answer_until(purpose, MINUTE, |_| true).await;
    assert_eq!((facts.dns_names.len(), facts.ips.len()), (1, 1));
    // Another address requests at once, also while a request is under way.
    nodes.send_replace(node(&[one[0], one[1], ("InternalIP", "fd00::1")]));
    fixture.requests(2).await;
    nodes.send_replace(node(&[one[0], one[1], ("InternalIP", "fd00::1"), ("ExternalIP", "192.0.2.1")]));
    fixture.requests(3).await;
    fixture.answer_until(purpose, MINUTE, |facts| facts.ips.len() == 3).await;
    // An address that is gone does not.
    nodes.send_replace(node(&one));
    tokio::time::sleep(TIMING.check_period * 4).await;
    assert_eq!(fixture.api.list(PLURAL).len(), 3);
    fixture.clock.advance(Duration::from_secs(49));
    let facts = fixture.answer_until(purpose, MINUTE, |facts| facts.ips.len() == 1).await;
    assert_eq!(facts.not_before, fixture.clock.wall());
    // The manager counts a certificate after it has stored it.
    let ages = "kubelet_certificate_manager_server_rotation_seconds_bucket{le=\"60.0\"}";
    until("the metrics", LONG, async || {
        let text = quintlet_telemetry::metrics::text();
        let has_end = text.contains("kubelet_certificate_manager_server_ttl_seconds 60.0\n");
        let has_age = text.lines().any(|line| line.starts_with(ages) && !line.ends_with(" 0"));
        if has_end && has_age { Ok(()) } else { Err(text) }
    })
    .await;
    stop.cancel();
    running.await.unwrap();
    assert_eq!(fixture.warnings(), [""; 0]);
}

#[tokio::test]
async fn a_signer_of_certificates_that_are_due_at_once_is_not_flooded() {
    const APART: Duration = Duration::from_millis(200);
    let fixture = Fixture::new().await;
    let timing = Timing { first_retry: APART, last_retry: APART, ..TIMING };
    let begin = tokio::time::Instant::now();
    let running = fixture.start_with(true, true, timing).await;
    // Four fifths of the life of each certificate have passed when it is issued.
    let (start, life) = (fixture.clock.wall() - jiff::SignedDuration::from_mins(5), MINUTE * 6);
    let mut answered = 0;
    until("four certificates", LONG, async || {
        answered += fixture.signer.answer_all(&fixture.api, start, life).len();
        if answered >= 4 { Ok(()) } else { Err(answered) }
    })
    .await;
    let took = begin.elapsed();
    assert!(took >= APART * 3, "four requests in {took:?}");
    running.end().await;
}

#[tokio::test]
async fn a_clock_that_steps_beyond_the_end_and_back_requests_once_and_keeps_the_new_certificate() {
    let mut fixture = Fixture::new().await;
    let begin = fixture.clock.wall();
    let running = fixture.start(true, true).await;
    fixture.bootstrapped(MINUTE).await;
    let ahead = begin + MINUTE * 60;
    fixture.clock.advance(MINUTE * 60);
    let requests = fixture.requests(2).await;
    assert!(requests[1]["metadata"]["name"].as_str().unwrap().starts_with("node-csr-"));
    let facts =
        fixture.answer_until(CertificatePurpose::Client, MINUTE, |facts| facts.not_before == ahead).await;
    fixture.wait_kubeconfig(&facts).await;
    running.end().await;
    // Back before the life of the new certificate, when the first one would be valid again. A fixed clock
    // only advances, so the manager starts with another one.
    fixture.clock = Clock::fixed(begin + MINUTE / 6, Duration::ZERO);
    let running = fixture.start(true, true).await;
    tokio::time::sleep(TIMING.check_period * 4).await;
    assert_eq!(fixture.api.list(PLURAL).len(), 2);
    assert_eq!(fixture.store(CertificatePurpose::Client).current().unwrap(), Some(facts.clone()));
    assert_eq!(names(&running.client.client()).await, ["kube-root-ca.crt"]);
    // It is rotated at its time by the corrected clock.
    fixture.clock.advance(MINUTE * 60 + Duration::from_secs(39));
    let requests = fixture.requests(3).await;
    assert!(requests[2]["metadata"]["name"].as_str().unwrap().starts_with("csr-"));
    fixture.answer_until(CertificatePurpose::Client, MINUTE, |new| new.not_after > facts.not_after).await;
    assert_eq!(fixture.warnings(), [""; 0]);
    running.end().await;
}

#[tokio::test]
async fn a_node_whose_clock_is_behind_uses_a_certificate_whose_life_has_not_begun() {
    let fixture = Fixture::new().await;
    let running = fixture.start(true, true).await;
    fixture.requests(1).await;
    let start = fixture.clock.wall() + MINUTE * 60;
    fixture.signer.answer_all(&fixture.api, start, MINUTE * 60);
    let store = fixture.store(CertificatePurpose::Client);
    let facts = until("the certificate in use", LONG, async || match store.current() {
        Ok(Some(facts)) => Ok(facts),
        other => Err(format!("{other:?}")),
    })
    .await;
    assert_eq!(facts.not_before, start);
    fixture.wait_kubeconfig(&facts).await;
    assert_eq!(names(&running.client.client()).await, ["kube-root-ca.crt"]);
    tokio::time::sleep(TIMING.check_period * 4).await;
    assert_eq!(fixture.api.list(PLURAL).len(), 1);
    assert_eq!(fixture.warnings(), [""; 0]);
    running.end().await;
}

/// A credential plugin for `sh -c` with a directory as its argument. Its token has the number of the run, and
/// ends at the time in the file `end`.
const PLUGIN: &str = r#"echo >> "$1/runs"
printf '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
"status": {"token": "token-%s", "expirationTimestamp": "%s"}}' "$(wc -l < "$1/runs")" "$(cat "$1/end")""#;

#[tokio::test]
async fn a_plugin_runs_again_for_a_request_within_a_minute_of_the_end_of_its_token() {
    let fixture = Fixture::new().await;
    let list = json!({"apiVersion": "v1", "kind": "ConfigMapList", "metadata": {}, "items": []}).to_string();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";
    let reply = format!("{head}content-length: {}\r\n\r\n{list}", list.len());
    let server = HttpServer::start(false, move |_| reply.clone()).await;
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "plugin",
        "clusters": [{"name": "plugin", "cluster": {"server": format!("http://127.0.0.1:{}", server.port)}}],
        "users": [{"name": "plugin", "user": {"exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "interactiveMode": "Never",
            "command": "sh",
            "args": ["-c", PLUGIN, "plugin", fixture.dir.path()],
        }}}],
        "contexts": [{"name": "plugin", "context": {"cluster": "plugin", "user": "plugin"}}],
    });
    std::fs::write(fixture.kubeconfig(), config.to_string()).unwrap();
    // The library compares the end with the clock of the machine.
    let set_end = |life: Duration| {
        let end = Clock::system().wall() + life;
        std::fs::write(fixture.path("end"), end.to_string()).unwrap();
    };
    set_end(MINUTE / 2);
    let node = NodeClient::open(&fixture.kubeconfig()).await.unwrap();
    let client = node.client();
    assert!(names(&client).await.is_empty());
    set_end(MINUTE * 60);
    for _ in 0..2 {
        assert!(names(&client).await.is_empty());
    }
    let token = |request: String| -> String {
        let lines = request.lines().map(str::to_ascii_lowercase);
        lines.filter_map(|line| line.strip_prefix("authorization: bearer ").map(str::to_owned)).collect()
    };
    let tokens: Vec<String> = server.requests().into_iter().map(token).collect();
    let [first, second, third] = tokens.as_slice() else { panic!("{tokens:?}") };
    assert!(first.starts_with("token-") && first != second, "{tokens:?}");
    assert_eq!(second, third, "the token has an hour left");
}
