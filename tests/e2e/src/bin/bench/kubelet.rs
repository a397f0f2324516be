//! A kubelet with a runtime and an API server of its own, for the same work.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_e2e::NODE;
use quintlet_e2e::cost::Agent;
use quintlet_localnode::Containerd;
use quintlet_recordings::cluster::Cluster;
use quintlet_recordings::kubelet::{Kubelet, KubeletCommand};
use quintlet_testapi::TestApi;
use serde_json::json;
use tempfile::TempDir;

use crate::raw::Runtime;

/// A node of one kubelet. It is stopped by a signal while something else is measured.
pub(crate) struct KubeletNode {
    kubelet: Kubelet,
    pub(crate) version: String,
    pub(crate) containerd: Containerd,
    pub(crate) runtime: Runtime,
    pub(crate) api: TestApi,
    // Removed after its users.
    base: TempDir,
}

impl KubeletNode {
    pub(crate) async fn start(binary: &Path) -> anyhow::Result<Self> {
        let base = tempfile::Builder::new().prefix("qe2e-kubelet-").tempdir()?;
        let at = |name: &str| base.path().join(name);
        let mut options = quintlet_localnode::Options::new(at("containerd"));
        options.owned = ["root", "pod-logs"].map(at).to_vec();
        let containerd = Containerd::start(options).await?;
        containerd.import_local_images().await?;
        let api = TestApi::start().await;
        let kubeconfig = at("kubeconfig");
        api.kubeconfig(&kubeconfig)?;
        // The defaults of a kubelet but for what Quintlet's node has as well. The API server reads JSON only.
        let config = json!({
            "cgroupRoot": containerd.cgroup_root(),
            "clusterDNS": [],
            "contentType": "application/json",
            "fileCheckFrequency": "20s",
            "maxPods": 300,
        });
        let kubelet = Kubelet::start(&KubeletCommand {
            binary,
            kubeconfig: &kubeconfig,
            base: base.path(),
            root_dir: base.path().join("root"),
            node: NODE,
            runtime: containerd.socket(),
            config,
        })?;
        kubelet.wait_ready(&Cluster::connect(&kubeconfig).await?).await?;
        let runtime = RuntimeServiceClient::new(containerd.channel().await?);
        let version = quintlet_recordings::kubelet::version(binary)?;
        Ok(Self { kubelet, version, containerd, runtime, api, base })
    }

    pub(crate) fn agent(&self) -> Agent<'_> {
        Agent { processes: vec![("kubelet", self.kubelet.pid())], api: &self.api, node: None }
    }

    /// Returns the root directory of the kubelet.
    pub(crate) fn root_dir(&self) -> PathBuf {
        self.base.path().join("root")
    }

    /// Lets the kubelet run, or not, while something else is measured.
    pub(crate) fn set_running(&self, runs: bool) -> anyhow::Result<()> {
        let signal = if runs { Signal::SIGCONT } else { Signal::SIGSTOP };
        kill(Pid::from_raw(self.kubelet.pid()), signal).context("the kubelet runs")
    }

    /// Removes the node.
    pub(crate) async fn down(self) -> anyhow::Result<()> {
        self.set_running(true)?;
        drop(self.kubelet);
        self.containerd.down().await?;
        Ok(())
    }
}
