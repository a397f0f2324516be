//! The whole service on its socket, for tests.

use std::time::Duration;

use quintlet_kit::args::paths::Paths;
use quintlet_kit::clock::Clock;
use quintlet_proto::status::v1 as wire;
use quintlet_proto::status::v1::status_reporter_client::StatusReporterClient;
use quintlet_testapi::TestApi;
use serde_json::{Value, json};
use status_reporter::run::{Config, NodeReportSettings, run};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

pub const TEST_TIMEOUT: Duration = Duration::from_secs(10);

pub struct Running {
    pub client: StatusReporterClient<Channel>,
    stop: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
    dir: tempfile::TempDir,
}

impl Running {
    /// Starts the service on a temporary socket; standalone without a server.
    pub async fn start(api: Option<&TestApi>) -> Self {
        Self::start_at(api, Clock::system()).await
    }

    pub async fn start_at(api: Option<&TestApi>, clock: Clock) -> Self {
        Self::start_with(api, clock, true, NodeReportSettings::default()).await
    }

    pub async fn start_with(
        api: Option<&TestApi>,
        clock: Clock,
        register_node: bool,
        settings: NodeReportSettings,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = api.map(|api| {
            let path = dir.path().join("kubeconfig");
            api.kubeconfig(&path).unwrap();
            path
        });
        let paths = Paths::new(dir.path());
        let socket = paths.status();
        let config = Config {
            paths,
            kubeconfig,
            node_name: "n1".into(),
            register_node,
            observers: Vec::new(),
            settings,
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(run(config, clock, stop.clone()));
        let client = StatusReporterClient::new(quintlet_kit::socket::channel(socket.clone()));
        let up = async {
            while tokio::net::UnixStream::connect(&socket).await.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, up).await.expect("the socket appears");
        Self { client, stop, task, dir }
    }

    pub async fn facts(&mut self, not_ready: &[&str]) {
        self.facts_at(Clock::system().boot(), not_ready).await;
    }

    pub async fn facts_at(&mut self, observed: Duration, not_ready: &[&str]) {
        self.facts_with(json!({}), observed, not_ready).await;
    }

    /// Reports facts of a node with this address.
    pub async fn facts_of(&mut self, address: &str, not_ready: &[&str]) {
        self.send_facts(json!({}), address, Clock::system().boot(), not_ready).await;
    }

    pub async fn facts_with(&mut self, metadata: Value, observed: Duration, not_ready: &[&str]) {
        self.send_facts(metadata, "127.0.0.1", observed, not_ready).await;
    }

    async fn send_facts(&mut self, metadata: Value, address: &str, observed: Duration, not_ready: &[&str]) {
        let node = json!({"metadata": metadata, "status": {
            "capacity": {"cpu": "2", "memory": "1Gi", "pods": "110", "ephemeral-storage": "9Gi"},
            "nodeInfo": {"bootID": "b", "kubeletVersion": "v1.37.0"}, "addresses": [{"type": "InternalIP", "address": address}],
        }});
        let request = wire::UpdateNodeRequest {
            source: "pod-sync".into(),
            node: node.to_string().into_bytes(),
            not_ready: not_ready.iter().map(|s| (*s).to_owned()).collect(),
            observed_boottime_ns: u64::try_from(observed.as_nanos()).unwrap(),
        };
        self.client.update_node(request).await.unwrap();
    }

    pub fn socket(&self) -> std::path::PathBuf {
        Paths::new(self.dir.path()).status()
    }

    pub async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(TEST_TIMEOUT, self.task).await.expect("it stops").unwrap().unwrap();
        drop(self.dir);
    }
}

pub fn ready(node: &Value) -> (&str, &str) {
    let conditions = node["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ready = conditions.iter().find(|c| c["type"] == "Ready").unwrap_or(&Value::Null);
    (ready["status"].as_str().unwrap_or_default(), ready["message"].as_str().unwrap_or_default())
}
