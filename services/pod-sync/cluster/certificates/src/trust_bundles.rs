//! The ClusterTrustBundles of the cluster (`pkg/kubelet/clustertrustbundle`).

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use k8s_openapi::api::certificates::v1::ClusterTrustBundleSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::{Api, ApiResource, NotUsed, Object};
use kube::core::{Selector, SelectorExt as _};
use kube::runtime::reflector::Store;
use kube::runtime::reflector::store::Writer;
use kube::runtime::{WatchStreamExt as _, watcher};
use pod_sync_clients::RequestError;
use pod_sync_direct_volumes::certificates::TrustAnchors;
use quintlet_kit::backoff::Backoff;
use tokio::sync::OnceCell;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::pem_blocks;
use crate::served::{GROUP, is_absent, served};

const KIND: &str = "ClusterTrustBundle";
const PLURAL: &str = "clustertrustbundles";
/// Longest wait of reads for the first list, from the start of the watch on.
const SYNC_WAIT: Duration = Duration::from_secs(10);
/// Delays between questions for a version after the API server stopped to serve one.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);
/// Longest selector, in bytes of its text.
const MAX_SELECTOR: usize = 100 * 1024;

/// A ClusterTrustBundle of any version.
type Bundle = Object<ClusterTrustBundleSpec, NotUsed>;

/// The ClusterTrustBundles of an API server, watched from the first read on.
pub struct ClusterTrustBundles {
    client: kube::Client,
    stop: CancellationToken,
    opened: OnceCell<Opened>,
    /// The order of certificates, which is stable as long as this process runs.
    order: RandomState,
}

enum Opened {
    /// The API server has no version of the API. It is not asked again, as in the kubelet.
    Absent,
    Watched {
        bundles: Store<Bundle>,
        /// Reads wait until then for the first list.
        wait_until: Instant,
    },
}

impl std::fmt::Debug for ClusterTrustBundles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterTrustBundles").finish_non_exhaustive()
    }
}

impl ClusterTrustBundles {
    /// Returns the objects of an API server. Sends no request. The cancellation of `stop` ends the watch.
    #[must_use]
    pub fn new(client: kube::Client, stop: CancellationToken) -> Self {
        Self { client, stop, opened: OnceCell::new(), order: RandomState::new() }
    }

    /// Returns the objects, once they were listed. The first call starts the watch.
    async fn bundles(&self) -> Result<&Store<Bundle>, String> {
        let opened = self.opened.get_or_try_init(|| self.open()).await.map_err(|error| {
            format!(
                "failed to ensure informer manager for ClusterTrustBundles: \
                 failed to determine which informer manager to choose: {error}"
            )
        })?;
        let (bundles, wait_until) = match opened {
            // The kubelet has this text here, too.
            Opened::Absent => {
                return Err(
                    "ClusterTrustBundle projection is not supported in static kubelet mode".to_owned()
                );
            }
            Opened::Watched { bundles, wait_until } => (bundles, *wait_until),
        };
        // The list is checked once even if the time is over.
        match tokio::time::timeout_at(wait_until, bundles.wait_until_ready()).await {
            Ok(Ok(())) => Ok(bundles),
            Ok(Err(_)) | Err(_) => Err("ClusterTrustBundle informer has not yet synced".to_owned()),
        }
    }

    /// Starts the watch. No await follows the start of its task, so a dropped call leaves no second watch.
    async fn open(&self) -> Result<Opened, RequestError> {
        let Some(resource) = served(&self.client, KIND, PLURAL).await? else {
            tracing::info!("API server has no ClusterTrustBundles, not watching");
            return Ok(Opened::Absent);
        };
        tracing::info!(version = resource.api_version, "watching ClusterTrustBundles");
        let writer = Writer::new(resource.clone());
        let bundles = writer.as_reader();
        let watch = keep_watching(self.client.clone(), resource, writer);
        // `stop` ends the task.
        drop(quintlet_kit::task::spawn(
            "trust-bundle-watch",
            self.stop.clone().run_until_cancelled_owned(watch),
        ));
        let wait_until = quintlet_kit::clock::deadline_after(Instant::now(), SYNC_WAIT);
        Ok(Opened::Watched { bundles, wait_until })
    }

    fn normalized<'a>(&self, bundles: impl IntoIterator<Item = &'a Bundle>) -> Result<String, String> {
        let mut distinct = BTreeSet::new();
        for bundle in bundles {
            let contents = pem_blocks::contents(&bundle.spec.trust_bundle);
            distinct.extend(contents.map_err(|error| format!("while normalizing trust anchors: {error}"))?);
        }
        let mut ordered: Vec<Vec<u8>> = distinct.into_iter().collect();
        ordered.sort_by_cached_key(|certificate| self.order.hash_one(certificate));
        Ok(pem_blocks::certificates(ordered))
    }
}

#[async_trait]
impl TrustAnchors for ClusterTrustBundles {
    async fn by_name(&self, name: &str, is_optional: bool) -> Result<String, String> {
        let bundles = self.bundles().await?;
        match bundles.find(|bundle| bundle.metadata.name.as_deref() == Some(name)) {
            Some(bundle) => self.normalized([&*bundle]),
            None if is_optional => Ok(String::new()),
            None => Err(format!(
                "while getting ClusterTrustBundle: clustertrustbundle.{GROUP} {name:?} not found"
            )),
        }
    }

    async fn by_signer(
        &self,
        signer: &str,
        selector: Option<&LabelSelector>,
        is_optional: bool,
    ) -> Result<String, String> {
        let bundles = self.bundles().await?;
        let selector = selector.cloned().map(Selector::try_from).transpose();
        let selector = selector.map_err(|error| format!("while parsing label selector: {error}"))?;
        let length = selector.as_ref().map_or(0, |selector| selector.to_string().len());
        if length > MAX_SELECTOR {
            return Err(format!("label selector length ({length}) is larger than {MAX_SELECTOR}"));
        }
        let no_labels = BTreeMap::new();
        let matches = |bundle: &Bundle| {
            let labels = bundle.metadata.labels.as_ref().unwrap_or(&no_labels);
            bundle.spec.signer_name.as_deref() == Some(signer)
                && selector.as_ref().is_some_and(|selector| selector.matches(labels))
        };
        let found = bundles.state_filter(matches);
        if found.is_empty() && !is_optional {
            return Err(
                "combination of signerName and labelSelector matched zero ClusterTrustBundles".to_owned()
            );
        }
        self.normalized(found.iter().map(|bundle| &**bundle))
    }
}

/// Watches the objects, in another version once the API server stops to serve one.
async fn keep_watching(client: kube::Client, mut resource: ApiResource, mut writer: Writer<Bundle>) {
    let mut delays = Backoff::new(FIRST_RETRY, 2.0, LAST_RETRY);
    loop {
        if watch(Api::all_with(client.clone(), &resource), &mut writer).await {
            delays.reset();
            let version = &resource.api_version;
            tracing::info!(version, "API server stopped serving ClusterTrustBundles in this version");
        }
        let found = loop {
            // First, since an API server may list a version that it does not serve.
            tokio::time::sleep(delays.next_wait()).await;
            match served(&client, KIND, PLURAL).await {
                Ok(Some(found)) => break found,
                Ok(None) => {}
                Err(error) => tracing::debug!(%error, "failed to look for ClusterTrustBundles, retrying"),
            }
        };
        if found != resource {
            tracing::info!(version = found.api_version, "watching ClusterTrustBundles");
        }
        resource = found;
    }
}

/// Watches the objects until the API server does not serve their version. Returns whether it ever did.
async fn watch(api: Api<Bundle>, writer: &mut Writer<Bundle>) -> bool {
    let stream = watcher(api, watcher::Config::default().any_semantic()).default_backoff();
    futures::pin_mut!(stream);
    let (mut is_failing, mut was_served) = (false, false);
    while let Some(event) = stream.next().await {
        match event {
            Ok(event) => {
                was_served |= !matches!(event, watcher::Event::Init);
                writer.apply_watcher_event(&event);
                // A list begins before each attempt.
                is_failing &= matches!(event, watcher::Event::Init);
            }
            Err(error) if is_absent(&error) => break,
            Err(error) => {
                let error = quintlet_kit::error_chain(&error);
                // One line when the watch begins to fail: the API server may be away for hours.
                match std::mem::replace(&mut is_failing, true) {
                    false => tracing::info!(error, "ClusterTrustBundle watch failed, retrying"),
                    true => tracing::debug!(error, "ClusterTrustBundle watch failed again, retrying"),
                }
            }
        }
    }
    was_served
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use quintlet_testapi::{Failure, TestApi};
    use quintlet_testkit::wait::until;
    use serde_json::{Value, json};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn certificates(contents: &[&str]) -> String {
        pem_blocks::certificates(contents.iter().map(|content| content.as_bytes().to_vec()))
    }

    fn sorted(text: &str) -> Vec<String> {
        let mut contents: Vec<String> = pem_blocks::contents(text)
            .unwrap()
            .into_iter()
            .map(|content| String::from_utf8(content).unwrap())
            .collect();
        contents.sort();
        contents
    }

    fn create(api: &TestApi, name: &str, signer: Option<&str>, labels: Value, bundle: &str) {
        let object = json!({
            "metadata": {"name": name, "labels": labels}, "spec": {"signerName": signer, "trustBundle": bundle},
        });
        api.create("clustertrustbundles", "", object).unwrap();
    }

    fn bundles(api: &TestApi) -> ClusterTrustBundles {
        ClusterTrustBundles::new(api.client(), CancellationToken::new())
    }

    #[tokio::test]
    async fn certificates_are_selected_by_name_or_by_signer_and_labels_and_each_is_there_once() {
        let api = TestApi::start().await;
        let mixed = format!("text\n{}between\n{}", certificates(&["a", "b"]), certificates(&["a"]));
        create(&api, "plain", None, json!({}), &mixed);
        create(&api, "s.one", Some("s"), json!({"tier": "x"}), &certificates(&["b", "c"]));
        create(&api, "s.two", Some("s"), json!({"tier": "y"}), &certificates(&["c", "d"]));
        create(&api, "t.one", Some("t"), json!({"tier": "x"}), &certificates(&["e"]));
        let bundles = bundles(&api);
        assert_eq!(sorted(&bundles.by_name("plain", false).await.unwrap()), ["a", "b"]);
        let missing = bundles.by_name("none", false).await.unwrap_err();
        assert_eq!(
            missing,
            "while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io \"none\" not found"
        );
        assert_eq!(bundles.by_name("none", true).await.unwrap(), "");
        let zero = "combination of signerName and labelSelector matched zero ClusterTrustBundles";
        let in_x = json!({"matchExpressions": [{"key": "tier", "operator": "In", "values": ["x"]}]});
        let long = json!({"matchLabels": {"tier": "v".repeat(MAX_SELECTOR)}});
        // Signer, selector; the certificates.
        type Row = (&'static str, Value, Result<&'static [&'static str], &'static str>);
        let table: [Row; 8] = [
            ("s", json!({}), Ok(&["b", "c", "d"])),
            ("s", json!(null), Err(zero)),
            ("s", json!({"matchLabels": {"tier": "y"}}), Ok(&["c", "d"])),
            ("s", in_x, Ok(&["b", "c"])),
            ("t", json!({"matchLabels": {"tier": "y"}}), Err(zero)),
            ("u", json!({}), Err(zero)),
            (
                "s",
                json!({"matchExpressions": [{"key": "tier", "operator": "Near"}]}),
                Err("while parsing label selector: "),
            ),
            ("s", long, Err("label selector length (102405) is larger than 102400")),
        ];
        for (signer, selector, expected) in table {
            let labels: Option<LabelSelector> = serde_json::from_value(selector.clone()).unwrap();
            let got = bundles.by_signer(signer, labels.as_ref(), false).await;
            match expected {
                Ok(expected) => assert_eq!(sorted(&got.unwrap()), expected, "{signer} {selector}"),
                Err(text) => assert!(got.as_ref().unwrap_err().starts_with(text), "{signer} {got:?}"),
            }
            if expected == Err(zero) {
                assert_eq!(bundles.by_signer(signer, labels.as_ref(), true).await.unwrap(), "");
            }
        }
    }

    #[tokio::test]
    async fn the_order_of_certificates_is_stable_in_a_process_and_another_in_the_next() {
        let api = TestApi::start().await;
        let names: Vec<String> = (0..20).map(|number| format!("certificate {number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        create(&api, "many", None, json!({}), &certificates(&names));
        let first = bundles(&api);
        let text = first.by_name("many", false).await.unwrap();
        assert_eq!(sorted(&text).len(), 20);
        assert_eq!(first.by_name("many", false).await.unwrap(), text);
        let next = bundles(&api).by_name("many", false).await.unwrap();
        assert!(next != text && sorted(&next) == sorted(&text));
    }

    #[tokio::test]
    async fn the_first_read_starts_one_watch_that_follows_the_objects() {
        let api = TestApi::start().await;
        let bundles = bundles(&api);
        let requests = || ["list", "watch"].map(|verb| api.counts().of(format!("{verb} {PLURAL}").as_str()));
        assert_eq!(requests(), [0, 0]);
        assert!(bundles.by_name("late", false).await.is_err());
        create(&api, "late", None, json!({}), &certificates(&["a"]));
        let content = async |expected: &str| {
            until("the content of the bundle", LONG, async || match bundles.by_name("late", true).await {
                Ok(text) if text == expected => Ok(()),
                other => Err(other),
            })
            .await;
        };
        content(&certificates(&["a"])).await;
        let change = |object: &mut Value| object["spec"]["trustBundle"] = json!(certificates(&["b"]));
        api.edit(PLURAL, "", "late", change).unwrap();
        content(&certificates(&["b"])).await;
        api.delete(PLURAL, "", "late", None).unwrap();
        content("").await;
        assert_eq!(requests(), [1, 1]);
    }

    #[tokio::test]
    async fn an_older_api_server_is_read_in_its_version_and_an_upgrade_changes_to_the_new_one() {
        let api = TestApi::start().await;
        api.faults().set_unserved(&["certificates.k8s.io/v1/clustertrustbundles"]);
        create(&api, "plain", None, json!({}), &certificates(&["a"]));
        let bundles = bundles(&api);
        assert_eq!(bundles.by_name("plain", false).await.unwrap(), certificates(&["a"]));
        api.faults().set_unserved(&["certificates.k8s.io/v1beta1/clustertrustbundles"]);
        api.faults().drop_watches();
        let change = |object: &mut Value| object["spec"]["trustBundle"] = json!(certificates(&["b"]));
        api.edit(PLURAL, "", "plain", change).unwrap();
        until("the content of the other version", LONG, async || {
            match bundles.by_name("plain", true).await {
                Ok(text) if text == certificates(&["b"]) => Ok(()),
                other => Err(other),
            }
        })
        .await;
    }

    // It waits for the first delay in real time, since the server has sockets.
    #[tokio::test]
    async fn a_version_that_is_listed_and_not_served_is_requested_again_after_a_delay() {
        let api = TestApi::start().await;
        create(&api, "plain", None, json!({}), &certificates(&["a"]));
        let absent = Failure::Declined { code: 404, message: "not found".to_owned() };
        api.faults().fail(format!("list {PLURAL}").as_str(), 1, absent);
        let (bundles, begin) = (bundles(&api), Instant::now());
        assert_eq!(bundles.by_name("plain", false).await.unwrap(), certificates(&["a"]));
        assert!(begin.elapsed() >= FIRST_RETRY, "{:?}", begin.elapsed());
        assert_eq!(api.counts().of(format!("list {PLURAL}").as_str()), 2);
    }

    #[tokio::test]
    async fn an_api_server_that_cannot_be_reached_gets_a_request_at_the_next_read() {
        let api = TestApi::start().await;
        create(&api, "plain", None, json!({}), &certificates(&["a"]));
        let bundles = bundles(&api);
        api.faults().set_down(true);
        let error = bundles.by_name("plain", false).await.unwrap_err();
        assert!(
            error.starts_with(
                "failed to ensure informer manager for ClusterTrustBundles: \
                 failed to determine which informer manager to choose: "
            ),
            "{error}"
        );
        api.faults().set_down(false);
        assert_eq!(bundles.by_name("plain", false).await.unwrap(), certificates(&["a"]));
    }

    #[tokio::test]
    async fn an_api_server_without_the_api_gets_one_request_for_each_version() {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        let client = kube::Client::new(
            tower::service_fn(move |request: http::Request<kube::client::Body>| {
                seen.lock().push(request.uri().path().to_owned());
                let body = json!({"kind": "Status", "apiVersion": "v1", "code": 404, "reason": "NotFound",
                    "status": "Failure", "metadata": {}, "message": "the server could not find the requested resource"});
                let body = http_body_util::Full::new(bytes::Bytes::from(body.to_string()));
                let response = http::Response::builder().status(404).body(body).unwrap();
                async { Ok::<_, std::io::Error>(response) }
            }),
            "default",
        );
        let bundles = ClusterTrustBundles::new(client, CancellationToken::new());
        for is_optional in [false, true] {
            let error = bundles.by_name("plain", is_optional).await.unwrap_err();
            assert_eq!(error, "ClusterTrustBundle projection is not supported in static kubelet mode");
        }
        let expected = ["/apis/certificates.k8s.io/v1", "/apis/certificates.k8s.io/v1beta1"];
        assert_eq!(*requests.lock(), expected);
    }
}
