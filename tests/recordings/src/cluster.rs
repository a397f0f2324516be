//! A client of the API server of a recording or of a simulation.

use std::path::Path;

use anyhow::{Context as _, bail};
use futures::Stream;
use http::Method;
use kube::core::WatchEvent;
use serde_json::{Value, json};

/// Path of the VolumeAttachments.
pub const ATTACHMENTS: &str = "/apis/storage.k8s.io/v1/volumeattachments";

/// A client of an API server, with all permissions.
#[derive(Clone)]
pub struct Cluster(kube::Client);

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cluster")
    }
}

impl Cluster {
    /// Connects with the credentials of a kubeconfig.
    ///
    /// # Errors
    /// Fails if the kubeconfig cannot be used.
    pub async fn connect(kubeconfig: &Path) -> anyhow::Result<Self> {
        let read = kube::config::Kubeconfig::read_from(kubeconfig)?;
        let config = kube::Config::from_custom_kubeconfig(read, &Default::default()).await?;
        Ok(Self(kube::Client::try_from(config)?))
    }

    /// Returns a cluster with an existing client.
    #[must_use]
    pub fn new(client: kube::Client) -> Self {
        Self(client)
    }

    /// Sends a request. A body of PATCH is a strategic merge patch.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, kube::Error> {
        let patches = method == Method::PATCH;
        let kind = if patches { "application/strategic-merge-patch+json" } else { "application/json" };
        self.send(method, path, kind, body).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        kind: &str,
        body: Option<&Value>,
    ) -> Result<Value, kube::Error> {
        let body = body.map_or_else(Vec::new, |b| b.to_string().into_bytes());
        self.0.request(request(method, path, kind, body)?).await
    }

    /// Starts a watch.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub async fn watch(
        &self,
        uri: &str,
    ) -> Result<impl Stream<Item = Result<WatchEvent<Value>, kube::Error>> + use<>, kube::Error> {
        self.0.request_events(request(Method::GET, uri, "application/json", Vec::new())?).await
    }

    /// Applies a JSON merge patch.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub async fn merge(&self, path: &str, patch: &Value) -> anyhow::Result<Value> {
        let sent = self.send(Method::PATCH, path, "application/merge-patch+json", Some(patch)).await;
        sent.with_context(|| path.to_owned())
    }

    /// Returns an object, or `None` if it does not exist.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub async fn get(&self, path: &str) -> anyhow::Result<Option<Value>> {
        match self.call(Method::GET, path, None).await {
            Ok(object) => Ok(Some(object)),
            Err(kube::Error::Api(e)) if e.code == 404 => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Creates an object.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub async fn create(&self, object: &Value) -> anyhow::Result<Value> {
        let path = collection(object["kind"].as_str().unwrap_or_default())?;
        self.call(Method::POST, &path, Some(object)).await.with_context(|| path_of(object).unwrap_or(path))
    }

    /// Applies a strategic merge patch.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub async fn patch(&self, path: &str, patch: &Value) -> anyhow::Result<Value> {
        self.call(Method::PATCH, path, Some(patch)).await.with_context(|| path.to_owned())
    }

    /// Deletes an object at once, if it exists.
    ///
    /// # Errors
    /// Returns the error of the API server.
    pub async fn delete(&self, path: &str) -> anyhow::Result<()> {
        match self.call(Method::DELETE, path, Some(&json!({"gracePeriodSeconds": 0}))).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(e)) if e.code == 404 => Ok(()),
            Err(e) => Err(e).with_context(|| path.to_owned()),
        }
    }
}

fn request(
    method: Method,
    uri: &str,
    kind: &str,
    body: Vec<u8>,
) -> Result<http::Request<Vec<u8>>, kube::Error> {
    let request = http::Request::builder().method(method).uri(uri).header("content-type", kind).body(body);
    request.map_err(|e| kube::Error::BuildRequest(kube::core::request::Error::BuildRequest(e)))
}

fn collection(kind: &str) -> anyhow::Result<String> {
    let namespaced = |plural: &str| format!("/api/v1/namespaces/default/{plural}");
    Ok(match kind {
        "Pod" => namespaced("pods"),
        "ConfigMap" => namespaced("configmaps"),
        "Secret" => namespaced("secrets"),
        "Service" => namespaced("services"),
        "PersistentVolumeClaim" => namespaced("persistentvolumeclaims"),
        "PersistentVolume" => "/api/v1/persistentvolumes".to_owned(),
        "CSIDriver" => "/apis/storage.k8s.io/v1/csidrivers".to_owned(),
        "Node" => "/api/v1/nodes".to_owned(),
        "CSINode" => "/apis/storage.k8s.io/v1/csinodes".to_owned(),
        "VolumeAttachment" => ATTACHMENTS.to_owned(),
        "RuntimeClass" => "/apis/node.k8s.io/v1/runtimeclasses".to_owned(),
        other => bail!("no way to make a {other}"),
    })
}

/// Returns the path of an object.
///
/// # Errors
/// Fails if the kind is unknown.
pub fn path_to(kind: &str, name: &str) -> anyhow::Result<String> {
    Ok(format!("{}/{name}", collection(kind)?))
}

/// Returns the path of an object.
///
/// # Errors
/// Fails if its kind is unknown.
pub fn path_of(object: &Value) -> anyhow::Result<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    path_to(&text(&object["kind"]), &text(&object["metadata"]["name"]))
}
