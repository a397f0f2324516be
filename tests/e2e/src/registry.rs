//! An image registry on loopback that counts requests and can delay layers.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Path as UrlPath, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use parking_lot::Mutex;
use quintlet_localnode::host;
use quintlet_localnode::oci::{self, Image, ImageEntry};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::wait::{LONG, until};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// A registry, which stops when dropped. containerd uses plain HTTP with registries on loopback.
#[derive(Debug)]
pub struct Registry {
    address: std::net::SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    content: Mutex<Content>,
    open: watch::Sender<bool>,
    /// The required `Authorization` header.
    wanted: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct Content {
    /// Digests of manifests, by `name:tag`.
    tags: BTreeMap<String, String>,
    blobs: BTreeMap<String, Vec<u8>>,
    /// Number of requests that resolve a tag, by `name:tag`.
    resolved: BTreeMap<String, usize>,
    /// Number of layer requests while the registry was closed.
    held: usize,
}

impl Registry {
    /// Starts a registry without images.
    ///
    /// # Panics
    /// No port is free.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port is free");
        let address = listener.local_addr().expect("a bound socket has an address");
        let shared = Arc::new(Shared {
            content: Mutex::default(),
            open: watch::Sender::new(true),
            wanted: Mutex::default(),
        });
        let router = Router::new()
            .route("/v2/", axum::routing::get(async || ()))
            .route("/v2/{name}/manifests/{reference}", axum::routing::get(manifest))
            .route("/v2/{name}/blobs/{digest}", axum::routing::get(blob))
            .layer(middleware::from_fn_with_state(Arc::clone(&shared), admit))
            .with_state(Arc::clone(&shared));
        let task = quintlet_kit::task::spawn("registry", async move {
            // It serves until the task is aborted.
            let _never = axum::serve(listener, router).await;
        });
        Self { address, shared, task }
    }

    /// Returns the full reference of an image in this registry.
    #[must_use]
    pub fn reference(&self, image: &str) -> String {
        format!("{}/{image}", self.address)
    }

    /// Adds an image: a shell, and a file that makes its layer different from that of any other image.
    ///
    /// # Panics
    /// There is no busybox.
    pub fn push(&self, image: &str) {
        let busybox = host::find_program("busybox").expect("busybox is installed");
        let binary = std::fs::read(&busybox).expect("busybox can be read");
        let entry = |path: &str, node, mode| ImageEntry { path: path.to_owned(), node, mode };
        let made = Image {
            name: self.reference(image),
            entries: vec![
                entry("bin", oci::ImageEntryKind::Dir, 0o755),
                entry("bin/busybox", oci::ImageEntryKind::File(binary), 0o755),
                entry("bin/sh", oci::ImageEntryKind::Symlink("busybox".to_owned()), 0o777),
                entry("bin/sleep", oci::ImageEntryKind::Symlink("busybox".to_owned()), 0o777),
                entry("image", oci::ImageEntryKind::File(image.as_bytes().to_vec()), 0o644),
            ],
            env: vec!["PATH=/bin".to_owned()],
            ..Image::default()
        };
        let archive = made.archive().expect("an image can be made");
        let files = files(&archive);
        let index: serde_json::Value = serde_json::from_slice(&files["index.json"]).expect("an OCI layout");
        let digest = index["manifests"][0]["digest"].as_str().expect("an OCI index").to_owned();
        let mut content = self.shared.content.lock();
        content.tags.insert(image.to_owned(), digest);
        let blobs = files.into_iter().filter_map(|(path, bytes)| {
            Some((format!("sha256:{}", path.strip_prefix("blobs/sha256/")?), bytes))
        });
        content.blobs.extend(blobs);
    }

    /// Requires these credentials from now on.
    pub fn require(&self, user: &str, password: &str) {
        let pair = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
        *self.shared.wanted.lock() = Some(format!("Basic {pair}"));
    }

    /// Returns how often a tag was resolved.
    #[must_use]
    pub fn resolved(&self, image: &str) -> usize {
        self.shared.content.lock().resolved.get(image).copied().unwrap_or_default()
    }

    /// Delays layers from now on.
    pub fn close(&self) {
        self.shared.open.send_replace(false);
    }

    /// Sends delayed layers.
    pub fn open(&self) {
        self.shared.open.send_replace(true);
    }

    /// Waits until a number of layer requests are delayed.
    pub async fn wait_held(&self, at_least: usize) -> usize {
        until(&format!("{at_least} requests for layers"), LONG, async || {
            let held = self.shared.content.lock().held;
            if held >= at_least { Ok(held) } else { Err(held) }
        })
        .await
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn files(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut tar = tar::Archive::new(archive);
    let entries = tar.entries().expect("a tar just made");
    entries
        .map(|entry| {
            let mut entry = entry.expect("a tar just made");
            let path = entry.path().map(|p: std::borrow::Cow<'_, Path>| p.display().to_string());
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).expect("a tar in memory");
            (path.expect("a tar just made"), bytes)
        })
        .collect()
}

async fn admit(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let is_refused = shared.wanted.lock().as_deref().is_some_and(|wanted| authorization != Some(wanted));
    if is_refused {
        let how = [(header::WWW_AUTHENTICATE, "Basic realm=\"tests\"")];
        return (StatusCode::UNAUTHORIZED, how).into_response();
    }
    next.run(request).await
}

async fn manifest(
    State(shared): State<Arc<Shared>>,
    UrlPath((name, reference)): UrlPath<(String, String)>,
) -> Response {
    let mut content = shared.content.lock();
    let digest = if reference.starts_with("sha256:") {
        reference
    } else {
        let image = format!("{name}:{reference}");
        *content.resolved.entry(image.clone()).or_default() += 1;
        match content.tags.get(&image) {
            Some(digest) => digest.clone(),
            None => return StatusCode::NOT_FOUND.into_response(),
        }
    };
    let Some(bytes) = content.blobs.get(&digest).cloned() else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let headers = [(header::CONTENT_TYPE.as_str(), MANIFEST), ("docker-content-digest", digest.as_str())];
    (headers, bytes).into_response()
}

async fn blob(
    State(shared): State<Arc<Shared>>,
    UrlPath((_, digest)): UrlPath<(String, String)>,
) -> Response {
    let mut open = shared.open.subscribe();
    if !*open.borrow() {
        shared.content.lock().held += 1;
    }
    // This function holds the sender.
    let _opened = open.wait_for(|open| *open).await;
    let found = shared.content.lock().blobs.get(&digest).cloned();
    match found {
        Some(bytes) => ([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}
