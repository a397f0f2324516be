//! A test API server: the parts of kube-apiserver that a node agent uses, in process and in memory.
//!
//! It serves pods, nodes, leases, events, configuration and tokens, with list, watch, the three patch types,
//! optimistic concurrency, graceful deletion, the defaults and the admission that an agent relies on, and
//! `Status` errors. Faults can be injected; requests are counted and logged. [`run_contract`] asserts the
//! contract against any server.
//!
//! One task accepts connections, and each connection has a task; all end when the last [`TestApi`] is
//! dropped. The watch history of each resource is bounded: a watch from an older version gets 410.

mod admit;
mod contract;
mod discovery;
mod error;
mod faults;
mod http;
mod identity;
mod nodes;
mod patch;
mod reply;
mod resources;
mod reviews;
mod select;
mod server;
mod signer;
mod store;
mod tls;
mod watch;

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

pub use crate::contract::{run_contract, run_node_contract};
pub use crate::error::ApiError;
pub use crate::faults::{Counts, Failure, Faults, Request, Requests};
pub use crate::signer::{SignerAnswer, TestSigner};

use crate::resources::Resource;
use crate::server::Server;
use crate::store::{DeleteOptions, Store};

/// Options of a server.
#[derive(Debug, Clone)]
pub struct Options {
    /// Listening address; port 0 by default.
    pub listen: SocketAddr,
    /// Whether to serve HTTPS with a certificate that the kubeconfig trusts.
    pub tls: bool,
    /// Changes per resource that are kept for watches.
    pub history: usize,
    /// Interval of bookmarks to idle watches that allow them.
    pub bookmark_every: Duration,
    /// Objects that the server has before its first client, as another server had them.
    pub objects: Vec<StoredObject>,
}

/// An object of another server, with its UID, its times and its status.
#[derive(Debug, Clone, Deserialize)]
pub struct StoredObject {
    /// Plural name of its resource.
    pub resource: String,
    /// Namespace; empty for objects of the cluster.
    #[serde(default)]
    pub namespace: String,
    /// The whole object, with its status.
    pub object: Value,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            tls: false,
            // A hundred changes to each of a hundred pods.
            history: 10_000,
            bookmark_every: Duration::from_secs(5),
            objects: Vec::new(),
        }
    }
}

struct Inner {
    server: Arc<Server>,
    address: SocketAddr,
    tls: bool,
    disturbed: std::sync::atomic::AtomicBool,
    /// Ends the server with the last handle.
    _stop: DropGuard,
}

/// A running test API server. Clones share it; it stops when the last one is dropped.
#[derive(Clone)]
pub struct TestApi {
    inner: Arc<Inner>,
}

impl TestApi {
    /// Starts a server on a free loopback port, plain HTTP.
    ///
    /// # Panics
    /// The loopback address cannot be bound.
    pub async fn start() -> Self {
        Self::start_with(Options::default()).await.expect("a free loopback port can be bound")
    }

    /// Starts a server.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn start_with(options: Options) -> io::Result<Self> {
        let listener = TcpListener::bind(options.listen).await?;
        let address = listener.local_addr()?;
        let server = Arc::new(Server {
            store: Store::new(options.history),
            faults: Faults::default(),
            traffic: faults::Traffic::default(),
            bookmark_every: options.bookmark_every,
            access: reviews::Access::default(),
        });
        // The identity of this server towards nodes, with the permissions of the role
        // system:kubelet-api-admin.
        server.access.set_token(nodes::NODE_TOKEN, nodes::NODE_USER, &[]);
        server.access.allow(nodes::NODE_USER, "*", "*");
        for stored in options.objects {
            let resource = known(&stored.resource).map_err(|error| io::Error::other(error.to_string()))?;
            server.store.restore(resource, &stored.namespace, stored.object);
        }
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        tasks.spawn(accept(listener, server.clone(), options.tls, stop.clone(), tasks.clone()));
        let api = Self {
            inner: Arc::new(Inner {
                server,
                address,
                tls: options.tls,
                disturbed: std::sync::atomic::AtomicBool::new(false),
                _stop: stop.drop_guard(),
            }),
        };
        for namespace in ["default", "kube-system", "kube-public", "kube-node-lease"] {
            api.create_namespace(namespace);
        }
        Ok(api)
    }

    /// Serves the certificate of this file in this process, which is created if the file does not exist.
    ///
    /// # Errors
    /// Fails if the file cannot be read or written, is invalid, or another certificate was served before.
    pub fn keep_certificate(path: &Path) -> io::Result<()> {
        tls::keep(path)
    }

    /// `http://127.0.0.1:<port>`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}://{}", if self.inner.tls { "https" } else { "http" }, self.inner.address)
    }

    /// Writes a kubeconfig for this server.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn kubeconfig(&self, path: &Path) -> io::Result<()> {
        self.write_kubeconfig(path, json!({}))
    }

    /// Writes a kubeconfig with the identity of a node, for which permissions are checked.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn node_kubeconfig(&self, path: &Path, node: &str) -> io::Result<()> {
        self.write_kubeconfig(path, json!({"token": format!("{}{node}", identity::NODE_USER)}))
    }

    fn write_kubeconfig(&self, path: &Path, user: Value) -> io::Result<()> {
        use base64::Engine;
        let mut cluster = json!({"server": self.url()});
        if self.inner.tls {
            let ca = base64::engine::general_purpose::STANDARD.encode(tls::placeholder_ca());
            cluster["certificate-authority-data"] = json!(ca);
        }
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "testapi",
            "clusters": [{"name": "testapi", "cluster": cluster}],
            "users": [{"name": "testapi", "user": user}],
            "contexts": [{"name": "testapi", "context": {"cluster": "testapi", "user": "testapi"}}],
        });
        // JSON is YAML.
        std::fs::write(path, serde_json::to_vec_pretty(&config)?)
    }

    /// Returns a client with all permissions.
    ///
    /// # Panics
    /// Never: the URL is this server's own.
    #[must_use]
    pub fn client(&self) -> kube::Client {
        self.client_as(None)
    }

    /// Returns a client with the identity of a node.
    ///
    /// # Panics
    /// Never: the URL is this server's own.
    #[must_use]
    pub fn node_client(&self, node: &str) -> kube::Client {
        self.client_as(Some(format!("{}{node}", identity::NODE_USER)))
    }

    fn client_as(&self, token: Option<String>) -> kube::Client {
        let mut config = kube::Config::new(self.url().parse().expect("the server's URL is a URL"));
        config.auth_info.token = token.map(Into::into);
        // Retries would hide responses from tests.
        config.default_retry = false;
        if self.inner.tls {
            use base64::Engine;
            let body: String = tls::placeholder_ca().lines().filter(|l| !l.starts_with("-----")).collect();
            config.root_cert =
                base64::engine::general_purpose::STANDARD.decode(body).ok().map(|der| vec![der]);
        }
        kube::Client::try_from(config).expect("a client without certificates can be made")
    }

    /// Returns the faults of the server.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        self.inner.disturbed.store(true, std::sync::atomic::Ordering::Relaxed);
        &self.inner.server.faults
    }

    /// Returns whether a fault was ever injected.
    #[must_use]
    pub fn was_disturbed(&self) -> bool {
        self.inner.disturbed.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Sets the largest object that an update may leave, in bytes of JSON. A larger one has the answer of an
    /// API server whose etcd does not take the object: 500 without a reason.
    pub fn limit_objects(&self, bytes: usize) {
        self.inner.disturbed.store(true, std::sync::atomic::Ordering::Relaxed);
        self.inner.server.store.limit_objects(bytes);
    }

    /// Returns the counts of requests.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.inner.server.traffic.counts()
    }

    /// Returns matching requests among the last 8192, oldest first.
    #[must_use]
    pub fn requests(&self, which: impl Into<Requests>) -> Vec<Request> {
        self.inner.server.traffic.requests(&which.into())
    }

    /// Resets the counts and the log of requests.
    pub fn reset_counts(&self) {
        self.inner.server.traffic.reset();
    }

    /// Assigns a token to a user, for TokenReview.
    pub fn set_token(&self, token: &str, user: &str, groups: &[&str]) {
        self.inner.server.access.set_token(token, user, groups);
    }

    /// Revokes a token.
    pub fn remove_token(&self, token: &str) {
        self.inner.server.access.remove_token(token);
    }

    /// Permits an operation to a user or group, for SubjectAccessReview: `allow("u", "get", "nodes/proxy")`;
    /// `*` matches any.
    pub fn allow(&self, user: &str, verb: &str, what: &str) {
        self.inner.server.access.allow(user, verb, what);
    }

    /// Revokes all permissions of a user.
    pub fn forbid_all(&self, user: &str) {
        self.inner.server.access.forbid_all(user);
    }

    /// Returns the requested reviews, oldest first.
    #[must_use]
    pub fn reviews(&self) -> Vec<Value> {
        self.inner.server.access.requested()
    }

    /// Waits for a number of matching requests.
    ///
    /// # Panics
    /// Panics after `timeout`; the message has the counts.
    pub async fn wait_for_requests(&self, which: impl Into<Requests>, at_least: u64, timeout: Duration) {
        let which = which.into();
        let mut traffic_changes = self.inner.server.traffic.subscribe();
        let enough = traffic_changes.wait_for(|_| self.counts().of(which.clone()) >= at_least);
        let in_time = tokio::time::timeout(timeout, enough).await.is_ok();
        assert!(in_time, "fewer than {at_least} of {which:?} after {timeout:?}: {:?}", self.counts());
    }

    /// Expires every resourceVersion so far. Open watches end with 410.
    pub fn expire(&self) {
        self.inner.server.store.compact();
        self.faults().cut_watches_as_expired();
    }

    /// Creates a namespace with its default service account and `kube-root-ca.crt`, unless it exists.
    pub fn create_namespace(&self, name: &str) {
        // An existing namespace is kept.
        let _already_there = self.create("namespaces", "", json!({"metadata": {"name": name}}));
        http::seed_namespace(&self.inner.server.store, name);
    }

    /// Creates an object like a POST, without counting it. `resource` is the plural name.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub fn create(&self, resource: &str, namespace: &str, object: Value) -> Result<Value, ApiError> {
        let resource = known(resource)?;
        self.inner.server.store.create(resource, namespace, object).map(|o| o.as_ref().clone())
    }

    /// Adds an object as another server had it, with its UID, its times and its status.
    ///
    /// # Errors
    /// The resource is unknown.
    pub fn restore(&self, resource: &str, namespace: &str, object: Value) -> Result<Value, ApiError> {
        Ok(self.inner.server.store.restore(known(resource)?, namespace, object).as_ref().clone())
    }

    /// Creates a pod in its namespace, or in `default`.
    ///
    /// # Panics
    /// Panics if the server rejects it.
    pub fn create_pod(&self, pod: Value) -> Value {
        let namespace = pod["metadata"]["namespace"].as_str().unwrap_or("default").to_owned();
        self.create("pods", &namespace, pod).expect("the server takes the pod")
    }

    /// Returns the current object.
    #[must_use]
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        self.share(resource, namespace, name).map(Arc::unwrap_or_clone)
    }

    /// Returns the current object without a copy: for waits that read it many times.
    #[must_use]
    pub fn share(&self, resource: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        self.inner.server.store.get(known(resource).ok()?, namespace, name).ok()
    }

    /// Returns all objects of a resource.
    #[must_use]
    pub fn list(&self, resource: &str) -> Vec<Value> {
        self.share_all(resource).into_iter().map(Arc::unwrap_or_clone).collect()
    }

    /// Returns all objects of a resource without copies.
    #[must_use]
    pub fn share_all(&self, resource: &str) -> Vec<Arc<Value>> {
        let Ok(resource) = known(resource) else { return Vec::new() };
        self.inner.server.store.list(resource, "", |_| true, None, usize::MAX).items
    }

    /// Edits an object like another client, without counting the request. `what` is `pods` or `pods/status`,
    /// for example.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub fn edit(
        &self,
        what: &str,
        namespace: &str,
        name: &str,
        change: impl FnOnce(&mut Value),
    ) -> Result<Value, ApiError> {
        let (resource, subresource) = what.split_once('/').unwrap_or((what, ""));
        let resource = known(resource)?;
        let change = |object: &mut Value| {
            change(object);
            Ok(())
        };
        self.inner
            .server
            .store
            .update(resource, namespace, name, subresource, change)
            .map(|o| o.as_ref().clone())
    }

    /// Deletes an object like another client. `grace` is in seconds; `None` means the object's own.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub fn delete(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
        grace: Option<i64>,
    ) -> Result<(), ApiError> {
        let resource = known(resource)?;
        let options = DeleteOptions { grace, ..DeleteOptions::default() };
        self.inner.server.store.delete(resource, namespace, name, &options).map(|_| ())
    }

    /// Calls `done` now and after changes of any object, until it returns true.
    pub async fn wait(&self, mut done: impl FnMut(&Self) -> bool) {
        let mut changed = self.inner.server.store.subscribe();
        loop {
            changed.borrow_and_update();
            if done(self) || changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// Waits until an object (null if it does not exist) satisfies `wanted`, and returns it.
    ///
    /// # Panics
    /// Panics after `timeout`; the message has the last object.
    pub async fn wait_for(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
        timeout: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Value {
        let mut changed = self.inner.server.store.subscribe();
        let deadline = tokio::time::Instant::now() + timeout;
        loop {
            changed.borrow_and_update();
            let object = known(resource).and_then(|r| self.inner.server.store.get(r, namespace, name)).ok();
            let current = object.as_deref().unwrap_or(&Value::Null);
            if wanted(current) {
                return current.clone();
            }
            let in_time = tokio::time::timeout_at(deadline, changed.changed()).await;
            assert!(
                in_time.is_ok(),
                "{resource} {namespace}/{name} is not as wanted after {timeout:?}: {current:#}"
            );
        }
    }
}

/// Applies a strategic merge patch like the API server. `resource` is the plural name.
///
/// # Errors
/// Fails if the patch is malformed.
pub fn strategic_merge(resource: &str, object: &mut Value, patch: Value) -> Result<(), String> {
    patch::apply(patch::PatchKind::Strategic, resource, object, patch)
}

fn known(plural: &str) -> Result<&'static Resource, ApiError> {
    Resource::by_plural(plural).ok_or_else(|| ApiError::new(404, "NotFound", format!("no resource {plural}")))
}

async fn accept(
    listener: TcpListener,
    server: Arc<Server>,
    tls: bool,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    loop {
        // Dropping accept loses nothing: the connection stays in the backlog.
        let stream = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let Ok((stream, _)) = stream else {
            // No file descriptors are left: waits until some are closed.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        if server.faults.is_down() {
            continue;
        }
        let cut = server.faults.connection();
        let (server, stop) = (server.clone(), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = connection(stream, server, tls) => {}
                () = cut.cancelled() => {}
                () = stop.cancelled() => {}
            }
        });
    }
}

async fn connection(stream: TcpStream, server: Arc<Server>, tls: bool) {
    // Small responses are sent at once. A socket that refuses the option still works.
    let _slower_without = stream.set_nodelay(true);
    if tls {
        if let Ok(stream) = tls::acceptor().accept(stream).await {
            serve(stream, server).await;
        }
    } else {
        serve(stream, server).await;
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, server: Arc<Server>) {
    let service = TowerToHyperService::new(http::router(server));
    let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
    // A broken connection is handled by the client.
    let _broken = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).await;
}
