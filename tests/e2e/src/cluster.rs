//! An administrator's client of an API server: the one in memory, or a real one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http::{Method, Request};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};

use crate::wait::until;

/// Environment variable with the kubeconfig of an administrator of a real cluster.
pub(crate) const ADMIN_ENV: &str = "QUINTLET_KUBECONFIG";
/// Environment variable with the kubeconfig of the identity `system:node:$QUINTLET_NODE` there.
pub(crate) const NODE_KUBECONFIG_ENV: &str = "QUINTLET_NODE_KUBECONFIG";
/// Environment variable with the name of that node, which must not run elsewhere.
pub(crate) const NODE_ENV: &str = "QUINTLET_NODE";

/// Access to a real cluster.
#[derive(Debug, Clone)]
pub struct Real {
    /// Kubeconfig of an administrator.
    pub admin: PathBuf,
    /// Kubeconfig of the node.
    pub kubeconfig: PathBuf,
    /// Name of the node, which runs nowhere before the test.
    pub node: String,
}

impl Real {
    /// Reads the environment variables.
    ///
    /// # Panics
    /// One is not set.
    #[must_use]
    pub fn of_env() -> Self {
        let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
        Self {
            admin: variable(ADMIN_ENV).into(),
            kubeconfig: variable(NODE_KUBECONFIG_ENV).into(),
            node: variable(NODE_ENV),
        }
    }
}

/// A cluster with the test's node.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    /// Name of the test's node.
    pub node: String,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Cluster {
    /// Uses the cluster of this client.
    #[must_use]
    pub fn new(client: Client, node: &str) -> Self {
        Self { client, node: node.to_owned() }
    }

    /// Connects to a real cluster.
    ///
    /// # Panics
    /// Its kubeconfig cannot be read.
    pub async fn real(real: &Real) -> Self {
        let config = Kubeconfig::read_from(&real.admin).expect("a kubeconfig");
        let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await;
        let client = Client::try_from(config.expect("a usable kubeconfig")).expect("a usable kubeconfig");
        Self::new(client, &real.node)
    }

    /// Creates an object. `resource` is the plural name. The namespace is empty for cluster scope.
    ///
    /// # Panics
    /// The API server rejects it.
    pub async fn create(&self, resource: &str, namespace: &str, object: Value) -> Value {
        let made = self.send(Method::POST, &path(resource, namespace, ""), Some(&object)).await;
        made.unwrap_or_else(|e| panic!("{resource}: {e}: {object:#}"))
    }

    /// Creates a pod that is bound to the node.
    ///
    /// # Panics
    /// The API server rejects it.
    pub async fn create_pod(&self, mut pod: Value) -> Value {
        pod["spec"]["nodeName"] = json!(self.node);
        self.create("pods", "default", pod).await
    }

    /// Returns an object.
    ///
    /// # Errors
    /// The API server does not respond.
    pub async fn get(&self, resource: &str, namespace: &str, name: &str) -> kube::Result<Option<Value>> {
        match self.send(Method::GET, &path(resource, namespace, name), None).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            other => other.map(Some),
        }
    }

    /// Returns all objects of a resource.
    ///
    /// # Panics
    /// The API server does not respond.
    pub async fn list(&self, resource: &str) -> Vec<Value> {
        let list = self.send(Method::GET, &path(resource, "", ""), None).await;
        let mut list = list.unwrap_or_else(|e| panic!("{resource}: {e}"));
        serde_json::from_value(list["items"].take()).expect("a list has items")
    }

    /// Changes an object, and retries on conflicts.
    ///
    /// # Panics
    /// It does not exist, or the API server rejects the change.
    pub async fn edit(&self, resource: &str, namespace: &str, name: &str, change: impl Fn(&mut Value)) {
        let path = path(resource, namespace, name);
        loop {
            let object = self.send(Method::GET, &path, None).await;
            let mut object = object.unwrap_or_else(|e| panic!("{path}: {e}"));
            change(&mut object);
            match self.send(Method::PUT, &path, Some(&object)).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                other => {
                    other.unwrap_or_else(|e| panic!("{path}: {e}: {object:#}"));
                    return;
                }
            }
        }
    }

    /// Deletes an object. It is not an error if it does not exist.
    ///
    /// # Panics
    /// The API server rejects it.
    pub async fn delete(&self, resource: &str, namespace: &str, name: &str) {
        match self.send(Method::DELETE, &path(resource, namespace, name), None).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            other => drop(other.unwrap_or_else(|e| panic!("{resource} {namespace}/{name}: {e}"))),
        }
    }

    /// Waits for a condition on an object (null if it does not exist), and returns it.
    ///
    /// # Panics
    /// The wait timed out.
    pub async fn wait_for(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
        limit: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Value {
        until(&format!("{resource} {namespace}/{name} as wanted"), limit, async || {
            let found = self.get(resource, namespace, name).await.map_err(|e| e.to_string())?;
            let object = found.unwrap_or(Value::Null);
            if wanted(&object) { Ok(object) } else { Err(format!("{object:#}")) }
        })
        .await
    }

    async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> kube::Result<Value> {
        let body = body.map(|b| b.to_string().into_bytes()).unwrap_or_default();
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        self.client.request(request.body(body).map_err(kube::Error::HttpError)?).await
    }
}

fn path(resource: &str, namespace: &str, name: &str) -> String {
    let group = match resource {
        "leases" => "/apis/coordination.k8s.io/v1",
        _ => "/api/v1",
    };
    let mut path = Path::new(group).to_owned();
    if !namespace.is_empty() {
        path.extend(["namespaces", namespace]);
    }
    path.push(resource);
    path.push(name);
    path.display().to_string().trim_end_matches('/').to_owned()
}
