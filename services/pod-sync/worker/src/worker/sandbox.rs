//! Creates the sandbox of a pod (`pkg/kubelet/kuberuntime: createPodSandbox`).

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_cri_config::dns;
use pod_sync_cri_config::error::ConfigError;
use pod_sync_cri_config::sandbox::{SandboxInput, sandbox_config};
use pod_sync_decisions::waiting::Waiting;
use pod_sync_layout::paths;
use quintlet_cri_api::v1 as cri;
use quintlet_kit::clock::Clock;
use quintlet_kit::failpoint;
use quintlet_kit::task::blocking;
use quintlet_model::ids::{PodRef, SandboxId};
use quintlet_model::pod as pods;

use super::halt::{Halt, RuntimeCall};
use super::observe::Observer;
use super::retries::RetryTimes;
use super::setup::PodSetup;
use crate::context::{NodeConfig, PodEnvironment, Reporting, RuntimeAccess, WorkerControl};

/// The name of the sandbox in [`RetryTimes`], which counts calls by container.
const SANDBOX: &str = "";

/// Returns that the sandbox of a pod cannot be created, after an event about it.
pub(super) fn no_sandbox(reporting: &Reporting, pod_ref: &PodRef, pod: &Pod, what: &str, why: &str) -> Halt {
    let text = format!("Failed to create pod sandbox: {why}");
    reporting.events.pod(pod, EventType::Warning, "FailedCreatePodSandBox", &text, "");
    Halt::failed(
        Waiting::SandboxFailing { message: why.to_owned() },
        format!("{what} for pod {:?}: {why}", pod_ref.to_string()),
    )
}

/// Creates the sandbox of one pod.
pub(super) struct Sandboxes<'a> {
    pub(super) clock: &'a Clock,
    pub(super) node: &'a NodeConfig,
    pub(super) runtime: &'a RuntimeAccess,
    pub(super) reporting: &'a Reporting,
    pub(super) environment: &'a PodEnvironment,
    pub(super) control: &'a WorkerControl,
    pub(super) pod_ref: &'a PodRef,
    pub(super) setup: &'a PodSetup,
    pub(super) observer: &'a mut Observer,
    pub(super) retries: &'a mut RetryTimes,
}

impl Sandboxes<'_> {
    /// Reads the node's resolver configuration.
    pub(super) async fn read_resolv_conf(&self) -> Result<dns::ResolvConf, ConfigError> {
        match self.node.settings.resolv_conf.clone() {
            Some(path) => blocking(move || dns::read_resolv_conf(&path)).await,
            None => Ok(dns::ResolvConf::default()),
        }
    }

    /// Returns the configuration of the sandbox. `host` is the node's resolver configuration.
    pub(super) fn config(
        &self,
        pod: &Pod,
        attempt: u32,
        is_new: bool,
        host: Result<dns::ResolvConf, ConfigError>,
    ) -> Result<cri::PodSandboxConfig, Halt> {
        let node = &self.node.settings;
        let cgroup_parent = self.environment.cgroups.pod_cgroup_parent(pod, &self.pod_ref.uid);
        let build = || {
            let (dns, warnings) = dns::pod_dns(pod, node, &host?);
            // Each warning is reported once per sandbox.
            for warning in warnings.iter().filter(|_| is_new) {
                let (message, reason) = (warning.message(self.pod_ref), warning.reason());
                match warning.on_node() {
                    // Without an API server there is no cluster DNS to configure, so the warnings of pod and
                    // node are one event.
                    Some(text) if !self.node.has_api => {
                        self.reporting.events.pod_and_node(pod, &node.node_name, reason, &message, text);
                    }
                    node_text => {
                        self.reporting.events.pod(pod, EventType::Warning, reason, &message, "");
                        if let Some(text) = node_text {
                            self.reporting.events.node(&node.node_name, EventType::Warning, reason, text);
                        }
                    }
                }
            }
            sandbox_config(SandboxInput {
                pod,
                names: self.pod_ref,
                attempt,
                node,
                cgroup_parent: &cgroup_parent,
                dns: &dns,
                runtime_handler: &self.setup.runtime_handler,
                features: self.runtime.features(&self.setup.runtime_handler),
                userns: self.setup.user_namespace.as_ref(),
                volume_groups: &self.environment.volume_tasks.groups(pod, &self.pod_ref.uid),
                has_exclusive_cpus: self.environment.placement.has_exclusive_cpus(&self.pod_ref.uid),
            })
        };
        build().map_err(|e: ConfigError| {
            no_sandbox(self.reporting, self.pod_ref, pod, "Failed to generate sandbox config", &e.to_string())
        })
    }

    /// Creates the sandbox. Returns its ID and the addresses of the pod.
    pub(super) async fn create(
        &mut self,
        pod: &Pod,
        config: cri::PodSandboxConfig,
    ) -> Result<(SandboxId, Vec<IpAddr>), Halt> {
        let logs = paths::pod_log_dir(&self.node.settings.pod_logs_dir, self.pod_ref);
        let made =
            blocking(move || failpoint::file!("log directory made", || std::fs::create_dir_all(&logs))).await;
        if let Err(e) = made {
            return Err(no_sandbox(
                self.reporting,
                self.pod_ref,
                pod,
                "Failed to create log directory",
                &e.to_string(),
            ));
        }
        let has_user_namespace = self.setup.user_namespace.is_some();
        self.reporting.metrics.started_pods.inc();
        if has_user_namespace {
            self.reporting.metrics.operations.user_namespaced_pods.inc();
        }
        let began = self.clock.boot();
        let made = self.runtime.calls.run_sandbox(config, &self.setup.runtime_handler).await;
        let took = self.clock.boot().saturating_sub(began);
        self.reporting.metrics.sandbox_started(&self.setup.runtime_handler, took, made.is_ok());
        let id = match made {
            Ok(id) => id,
            Err(e) => {
                self.reporting.metrics.started_pods_errors.inc();
                if has_user_namespace {
                    self.reporting.metrics.operations.user_namespaced_pods_errors.inc();
                }
                if !self.retries.is_failure(&e, SANDBOX, "", self.clock.boot()) {
                    return Err(Halt::interrupted(&e));
                }
                if !self.control.pod_workers.is_ending(&self.pod_ref.uid) {
                    let text = format!("Failed to create pod sandbox: {e}");
                    self.reporting.events.pod(pod, EventType::Warning, "FailedCreatePodSandBox", &text, "");
                }
                return Err(Halt::refused(&e, RuntimeCall::MakeSandbox));
            }
        };
        self.retries.settled(SANDBOX, "RunPodSandbox");
        self.observer.sandbox_created(&id);
        if pods::host_network(pod) {
            return Ok((id, self.node.settings.node_ips.get()));
        }
        let status = self.runtime.calls.sandbox_status(&id).await.map_err(|e| {
            if e.is_refused_by_runtime() {
                let text = format!("Unable to get pod sandbox status: {e}");
                self.reporting.events.pod(pod, EventType::Warning, "FailedPodSandBoxStatus", &text, "");
            }
            Halt::of(&e, RuntimeCall::ReadSandbox)
        })?;
        let network = status.network.unwrap_or_default();
        let all = std::iter::once(network.ip)
            .chain(network.additional_ips.into_iter().map(|ip| ip.ip))
            .filter(|ip| !ip.is_empty());
        // A malformed address invalidates all of them.
        let ips = all.map(|ip| ip.parse()).collect::<Result<Vec<IpAddr>, _>>().unwrap_or_default();
        Ok((id, ips))
    }
}
