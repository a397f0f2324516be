//! The loop with the test API server. The wall clock is moved by hand.

use pod_sync_clients::UnsentEvents;
use quintlet_testapi::TestApi;
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

use super::*;

const LONG: Duration = Duration::from_secs(20);
const PLURAL: &str = "podcertificaterequests";
const HOUR: SignedDuration = SignedDuration::from_hours(1);

struct Fixture {
    api: TestApi,
    clock: Clock,
    certificates: Arc<PodCertificates>,
    wakeups: Arc<WorkerWakeups>,
    _dir: tempfile::TempDir,
}

impl Fixture {
    async fn new() -> Self {
        let api = TestApi::start().await;
        api.create("namespaces", "", json!({"metadata": {"name": "shop"}})).unwrap();
        api.create("serviceaccounts", "shop", json!({"metadata": {"name": "web"}})).unwrap();
        let node = api.create("nodes", "", json!({"metadata": {"name": "n1"}})).unwrap();
        let node: Node = serde_json::from_value(node).unwrap();
        let clock = Clock::fixed("2026-11-23T10:00:00Z".parse().unwrap(), Duration::ZERO);
        let dir = tempfile::tempdir().unwrap();
        let (stop, wakeups) = (CancellationToken::new(), Arc::new(WorkerWakeups::default()));
        let unsent = UnsentEvents::open(dir.path().join("events"), "boot");
        let inputs = PodCertificateContext {
            node: "n1".to_owned(),
            nodes: watch::Sender::new(Some(Arc::new(node))).subscribe(),
            events: Events::new(dir.path().join("none.sock"), unsent, clock.clone(), stop.clone()),
            wakeups: Arc::clone(&wakeups),
            clock: clock.clone(),
        };
        let certificates = PodCertificates::with_jitter(api.client(), inputs, Duration::ZERO, stop);
        Self { api, clock, certificates, wakeups, _dir: dir }
    }

    fn read(&self, pod: &str, index: usize) -> Result<Arc<CredentialBundle>, String> {
        self.read_as(pod, index, "web")
    }

    fn read_as(&self, pod: &str, index: usize, account: &str) -> Result<Arc<CredentialBundle>, String> {
        let uid = format!("uid-of-{pod}");
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": pod, "namespace": "shop", "uid": uid},
            "spec": {"serviceAccountName": account, "containers": []},
        }))
        .unwrap();
        let source = serde_json::from_value(json!({
            "signerName": "example.com/s", "keyType": "ED25519", "maxExpirationSeconds": 4000,
            "userAnnotations": {"example.com/a": "b"},
        }));
        self.certificates.read(&pod, &PodUid::parse(&uid).unwrap(), "v", index, &source.unwrap())
    }

    fn changes(&self, pod: &str) -> u64 {
        self.certificates.changes(&PodUid::parse(&format!("uid-of-{pod}")).unwrap())
    }

    /// Waits for the only request of a pod that is not in `known`, and returns it.
    async fn request(&self, pod: &str, known: &[&Value]) -> Value {
        until("a new request", LONG, async || {
            let all = self.api.list(PLURAL);
            let is_known = |request: &Value| {
                known.iter().any(|known| known["metadata"]["uid"] == request["metadata"]["uid"])
            };
            let mut new: Vec<Value> = all
                .into_iter()
                .filter(|request| request["spec"]["podName"] == pod && !is_known(request))
                .collect();
            if new.len() == 1 { Ok(new.remove(0)) } else { Err(new) }
        })
        .await
    }

    fn answer(&self, request: &Value, status: Value) {
        let name = request["metadata"]["name"].as_str().unwrap();
        let change = |object: &mut Value| object["status"] = status.clone();
        self.api.edit(&format!("{PLURAL}/status"), "shop", name, change).unwrap();
    }

    /// Issues a certificate whose refresh begins in an hour.
    fn issue(&self, request: &Value, content: &str) {
        let now = self.clock.wall();
        let chain = format!("-----BEGIN CERTIFICATE-----\n{content}\n-----END CERTIFICATE-----\n");
        self.answer(
            request,
            json!({"conditions": [condition("Issued", "")], "certificateChain": chain, "notBefore": now,
                "beginRefreshAt": now + HOUR, "notAfter": now + HOUR * 2}),
        );
    }

    async fn wait_read(&self, pod: &str, index: usize, content: &str) -> Arc<CredentialBundle> {
        until(&format!("{content} of {pod}"), LONG, async || match self.read(pod, index) {
            Ok(bundle) if bundle.certificates.contains(content) => Ok(bundle),
            other => Err(other),
        })
        .await
    }

    fn advance(&self, duration: SignedDuration) {
        self.clock.advance(Duration::try_from(duration).unwrap());
        self.certificates.changed.notify_one();
    }

    fn events(&self, pod: &str) -> Vec<(String, String)> {
        let events = self.certificates.inputs.events.list(&format!("uid-of-{pod}"), 100);
        events.into_iter().map(|event| (event.reason, event.message)).collect()
    }
}

/// Returns the public key of the private key of a bundle.
fn public_key(bundle: &CredentialBundle) -> Vec<u8> {
    use ring::signature::{Ed25519KeyPair, KeyPair as _};

    let der = pem::parse(&bundle.key).unwrap().into_contents();
    Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der).unwrap().public_key().as_ref().to_vec()
}

/// Returns the public key of a PodCertificateRequest.
fn key_of_request(request: &Value) -> Vec<u8> {
    use x509_parser::prelude::{FromDer as _, X509CertificationRequest};

    let der: ByteString = serde_json::from_value(request["spec"]["stubPKCS10Request"].clone()).unwrap();
    let (_, parsed) = X509CertificationRequest::from_der(&der.0).unwrap();
    parsed.certification_request_info.subject_pki.subject_public_key.data.to_vec()
}

fn condition(kind: &str, message: &str) -> Value {
    json!({"type": kind, "status": "True", "reason": "Because", "message": message,
        "lastTransitionTime": "2026-11-23T10:00:00Z"})
}

#[tokio::test]
async fn a_request_names_its_pod_and_its_certificate_is_read_with_its_key() {
    let fixture = Fixture::new().await;
    let counts = || {
        ["create", "list", "watch"].map(|verb| fixture.api.counts().of(format!("{verb} {PLURAL}").as_str()))
    };
    assert_eq!(counts(), [0, 0, 0]);
    let worker = fixture.wakeups.register(&PodUid::parse("uid-of-web").unwrap());
    assert_eq!(fixture.read("web", 0).unwrap_err(), "credential bundle is not issued yet");
    let request = fixture.request("web", &[]).await;
    let (meta, spec) = (&request["metadata"], &request["spec"]);
    assert!(meta["name"].as_str().unwrap().starts_with("req-"), "{meta}");
    let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "uid-of-web"}]);
    assert_eq!(meta["ownerReferences"], owner);
    let uid = |plural: &str, namespace: &str, name: &str| {
        fixture.api.get(plural, namespace, name).unwrap()["metadata"]["uid"].clone()
    };
    for (field, expected) in [
        ("signerName", json!("example.com/s")),
        ("podName", json!("web")),
        ("podUID", json!("uid-of-web")),
        ("serviceAccountName", json!("web")),
        ("serviceAccountUID", uid("serviceaccounts", "shop", "web")),
        ("nodeName", json!("n1")),
        ("nodeUID", uid("nodes", "", "n1")),
        ("maxExpirationSeconds", json!(4000)),
        ("unverifiedUserAnnotations", json!({"example.com/a": "b"})),
        ("pkixPublicKey", Value::Null),
        ("proofOfPossession", Value::Null),
    ] {
        assert_eq!(spec[field], expected, "{field}");
    }
    assert_eq!(request["apiVersion"], "certificates.k8s.io/v1");
    assert!(fixture.read("web", 0).is_err());
    fixture.issue(&request, "YQ==");
    tokio::time::timeout(LONG, worker.notified()).await.unwrap();
    let bundle = fixture.wait_read("web", 0, "YQ==").await;
    assert!(bundle.key.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    assert!(!format!("{bundle:?} {:?}", fixture.certificates).contains("PRIVATE KEY"));
    assert_eq!(key_of_request(&request), public_key(&bundle));
    assert_eq!((fixture.changes("web"), counts()), (1, [1, 1, 1]));
    assert_eq!(fixture.events("web"), []);
}

#[tokio::test]
async fn an_older_api_server_gets_requests_in_its_version_and_an_upgrade_changes_to_the_new_one() {
    let fixture = Fixture::new().await;
    fixture.api.faults().set_unserved(&["certificates.k8s.io/v1/podcertificaterequests"]);
    assert!(fixture.read("web", 0).is_err());
    let first = fixture.request("web", &[]).await;
    assert_eq!(first["apiVersion"], "certificates.k8s.io/v1beta1");
    fixture.issue(&first, "YQ==");
    let old = fixture.wait_read("web", 0, "YQ==").await;

    fixture.api.faults().set_unserved(&["certificates.k8s.io/v1beta1/podcertificaterequests"]);
    fixture.api.faults().drop_watches();
    assert!(fixture.read("late", 0).is_err());
    let second = fixture.request("late", &[]).await;
    assert_eq!(second["apiVersion"], "certificates.k8s.io/v1");
    fixture.issue(&second, "Yg==");
    fixture.wait_read("late", 0, "Yg==").await;
    assert_eq!(fixture.read("web", 0).unwrap(), old);
}

#[tokio::test]
async fn a_pod_waits_for_an_api_server_that_does_not_serve_requests_and_its_message_says_so() {
    let fixture = Fixture::new().await;
    let both = ["certificates.k8s.io/v1", "certificates.k8s.io/v1beta1"];
    let both = both.map(|version| format!("{version}/podcertificaterequests"));
    fixture.api.faults().set_unserved(&both.each_ref().map(String::as_str));
    until("the reason", LONG, async || match fixture.read("web", 0) {
        Err(error) if error == NOT_SERVED => Ok(()),
        other => Err(other),
    })
    .await;
    fixture.api.faults().set_unserved(&[]);
    let request = fixture.request("web", &[]).await;
    fixture.issue(&request, "YQ==");
    fixture.wait_read("web", 0, "YQ==").await;
}

#[tokio::test]
async fn sources_of_one_pod_have_certificates_of_their_own_and_a_refusal_is_an_event() {
    let fixture = Fixture::new().await;
    assert!(fixture.read("web", 0).is_err());
    let first = fixture.request("web", &[]).await;
    assert!(fixture.read("web", 1).is_err());
    let second = fixture.request("web", &[&first]).await;
    fixture.issue(&first, "YQ==");
    fixture.answer(&second, json!({"conditions": [condition("Denied", "no")]}));
    let bundle = fixture.wait_read("web", 0, "YQ==").await;
    let text = "PodCertificateRequest was permanently denied: reason=\"Because\" message=\"no\"";
    until("the refusal", LONG, async || match fixture.read("web", 1) {
        Err(error) if error == text => Ok(()),
        other => Err(other),
    })
    .await;
    let name = second["metadata"]["name"].as_str().unwrap();
    let message = format!("PodCertificateRequest shop/{name} was denied, reason=\"Because\", message=\"no\"");
    assert_eq!(fixture.events("web"), [("Denied".to_owned(), message)]);
    assert_eq!(fixture.read("web", 0).unwrap(), bundle);
}

#[tokio::test]
async fn a_refresh_replaces_key_and_certificate_together() {
    let fixture = Fixture::new().await;
    assert!(fixture.read("web", 0).is_err());
    let first = fixture.request("web", &[]).await;
    fixture.issue(&first, "YQ==");
    let old = fixture.wait_read("web", 0, "YQ==").await;
    fixture.advance(HOUR);
    let second = fixture.request("web", &[&first]).await;
    assert_ne!(second["spec"]["stubPKCS10Request"], first["spec"]["stubPKCS10Request"]);
    assert_eq!(fixture.read("web", 0).unwrap(), old);
    // An expired certificate stays until there is another one.
    fixture.advance(HOUR * 2);
    until("the events of age", LONG, async || {
        let reasons: Vec<String> = fixture.events("web").into_iter().map(|(reason, _)| reason).collect();
        if reasons == ["CertificateOverdueForRefresh", "CertificateExpired"] { Ok(()) } else { Err(reasons) }
    })
    .await;
    assert_eq!(fixture.read("web", 0).unwrap(), old);
    fixture.issue(&second, "Yg==");
    let new = fixture.wait_read("web", 0, "Yg==").await;
    assert_ne!(new.key, old.key);
    assert_eq!([&old, &new].map(|bundle| public_key(bundle)), [&first, &second].map(key_of_request));
    assert_eq!(fixture.changes("web"), 2);
}

#[tokio::test]
async fn a_deleted_request_is_created_again_after_ten_minutes() {
    let fixture = Fixture::new().await;
    assert!(fixture.read("web", 0).is_err());
    let first = fixture.request("web", &[]).await;
    fixture.api.delete(PLURAL, "shop", first["metadata"]["name"].as_str().unwrap(), None).unwrap();
    // The age counts from the response to the creation.
    until("the response", LONG, async || {
        let pods = fixture.certificates.pods.lock();
        let states = pods.values().flat_map(|pod| pod.sources.values()).map(|record| record.state.clone());
        let states: Vec<CertificateState> = states.collect();
        if matches!(states[..], [CertificateState::Waiting(_)]) { Ok(()) } else { Err(states) }
    })
    .await;
    fixture.advance(SignedDuration::from_mins(11));
    let second = fixture.request("web", &[]).await;
    fixture.issue(&second, "YQ==");
    fixture.wait_read("web", 0, "YQ==").await;
}

#[tokio::test]
async fn a_creation_that_fails_is_repeated_and_delays_no_other_pod() {
    let fixture = Fixture::new().await;
    assert!(fixture.read_as("late", 0, "late").is_err());
    assert!(fixture.read("web", 0).is_err());
    let request = fixture.request("web", &[]).await;
    fixture.issue(&request, "YQ==");
    fixture.wait_read("web", 0, "YQ==").await;
    fixture.api.create("serviceaccounts", "shop", json!({"metadata": {"name": "late"}})).unwrap();
    let request = fixture.request("late", &[]).await;
    fixture.issue(&request, "Yg==");
    fixture.wait_read("late", 0, "Yg==").await;
    // One request per second at most.
    assert!(fixture.api.counts().of("get serviceaccounts") < 10);
}

#[tokio::test]
async fn the_key_of_a_pod_that_ended_is_dropped_and_its_next_one_is_another() {
    let fixture = Fixture::new().await;
    assert!(fixture.read("web", 0).is_err());
    let first = fixture.request("web", &[]).await;
    fixture.issue(&first, "YQ==");
    let old = fixture.wait_read("web", 0, "YQ==").await;
    fixture.certificates.forget(&PodUid::parse("uid-of-web").unwrap());
    assert!(fixture.certificates.pods.lock().is_empty());
    assert_eq!(Arc::strong_count(&old), 1);
    assert!(fixture.read("web", 0).is_err());
    let second = fixture.request("web", &[&first]).await;
    fixture.issue(&second, "Yg==");
    assert_ne!(fixture.wait_read("web", 0, "Yg==").await.key, old.key);
}
