//! Runs a kubelet.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::mount::MntFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::cluster::Cluster;
use crate::runtime::{ALLOWED_SYSCTLS, CLUSTER_DNS, CLUSTER_DOMAIN, NODE, RESOLV_CONF};
use crate::waiting::until;

/// Time that the kubelet has to exit.
const GRACE: Duration = Duration::from_secs(5);

/// Program, configuration and connections of a kubelet.
#[derive(Debug)]
pub struct KubeletCommand<'a> {
    /// Path of the kubelet.
    pub binary: &'a Path,
    /// Kubeconfig of the node.
    pub kubeconfig: &'a Path,
    /// Directory of its files but for those in the root directory.
    pub base: &'a Path,
    /// Root directory, with the files of pods.
    pub root_dir: PathBuf,
    /// Name of its node.
    pub node: &'a str,
    /// Socket of its runtime.
    pub runtime: &'a Path,
    /// Fields of its configuration that replace those of recordings.
    pub config: Value,
}

impl<'a> KubeletCommand<'a> {
    /// Returns a kubelet on the fake runtime, as the node of recordings.
    #[must_use]
    pub fn recorded(binary: &'a Path, kubeconfig: &'a Path, base: &'a Path, runtime: &'a Path) -> Self {
        let root_dir = base.join("root");
        Self { binary, kubeconfig, base, root_dir, node: NODE, runtime, config: Value::Null }
    }
}

/// A running kubelet. Dropping it stops the kubelet and removes its mounts in [`KubeletCommand::base`] and
/// its cgroups.
#[derive(Debug)]
pub struct Kubelet {
    child: Child,
    base: PathBuf,
    node: String,
    cgroup_root: String,
}

impl Kubelet {
    /// Starts a kubelet.
    ///
    /// # Errors
    /// Fails if it cannot be started.
    pub fn start(plan: &KubeletCommand<'_>) -> anyhow::Result<Self> {
        let KubeletCommand { base, .. } = plan;
        let cgroup_root = match &plan.config["cgroupRoot"] {
            Value::String(root) => root.clone(),
            _ => format!("/qrec-{}", std::process::id()),
        };
        make_cgroup(&cgroup_root)?;
        std::fs::create_dir_all(base.join("manifests"))?;
        std::fs::write(base.join("resolv.conf"), RESOLV_CONF)?;
        let at = |name: &str| base.join(name).display().to_string();
        let mut config = serde_json::json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "allowedUnsafeSysctls": ALLOWED_SYSCTLS,
            "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroup_root,
            "clusterDNS": [CLUSTER_DNS],
            "clusterDomain": CLUSTER_DOMAIN,
            "containerRuntimeEndpoint": format!("unix://{}", plan.runtime.display()),
            "enableServer": false,
            "evictionHard": {"memory.available": "1Mi"},
            "failCgroupV1": false,
            "failSwapOn": false,
            "healthzPort": 0,
            "imageGCHighThresholdPercent": 100,
            "podLogsDir": at("pod-logs"),
            "resolvConf": at("resolv.conf"),
            "staticPodPath": at("manifests"),
            "fileCheckFrequency": "1s",
        });
        for (field, value) in plan.config.as_object().into_iter().flatten() {
            config[field] = value.clone();
        }
        std::fs::write(base.join("kubelet.yaml"), config.to_string())?;
        let log = File::create(base.join("kubelet.log"))?;
        let child = Command::new(plan.binary)
            .args(["--config", &at("kubelet.yaml"), "--cert-dir", &at("cert")])
            .arg("--root-dir")
            .arg(&plan.root_dir)
            .args(["--hostname-override", plan.node])
            .arg("--kubeconfig")
            .arg(plan.kubeconfig)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("{}", plan.binary.display()))?;
        Ok(Self { child, base: base.to_path_buf(), node: plan.node.to_owned(), cgroup_root })
    }

    /// Waits until the node is ready, and returns its address.
    ///
    /// # Errors
    /// Fails with the end of the kubelet's log if the node does not become ready.
    pub async fn wait_ready(&self, cluster: &Cluster) -> anyhow::Result<String> {
        let ready = until("the node", async || {
            let node = cluster.get(&format!("/api/v1/nodes/{}", self.node)).await?.unwrap_or_default();
            let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let ready = conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
            let addresses = node["status"]["addresses"].as_array().cloned().unwrap_or_default();
            let address =
                addresses.iter().find(|a| a["type"] == "InternalIP").and_then(|a| a["address"].as_str());
            Ok(address.filter(|_| ready).map(str::to_owned).ok_or_else(|| format!("{conditions:?}")))
        });
        let error = match ready.await {
            Ok(address) => return Ok(address),
            Err(error) => error,
        };
        let log = std::fs::read_to_string(self.base.join("kubelet.log"))?;
        let end: Vec<&str> = log.lines().rev().take(20).collect();
        bail!("{error:#}\n{}", end.into_iter().rev().collect::<Vec<_>>().join("\n"));
    }

    /// Returns its process ID.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Returns the kubelet's cgroup.
    #[must_use]
    pub fn cgroup_root(&self) -> &str {
        &self.cgroup_root
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        let _already_gone = kill(Pid::from_raw(self.pid()), Signal::SIGTERM);
        let clock = quintlet_kit::clock::Clock::system();
        let until = clock.boot() + GRACE;
        while matches!(self.child.try_wait(), Ok(None)) && clock.boot() < until {
            std::thread::sleep(Duration::from_millis(50));
        }
        let _already_gone = self.child.kill();
        let _already_gone = self.child.wait();
        let base = self.base.display().to_string();
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        for at in mounts.lines().filter_map(|l| l.split(' ').nth(1)).filter(|at| at.starts_with(&base)) {
            let _already_gone = nix::mount::umount2(at, MntFlags::MNT_DETACH);
        }
        remove_cgroup(&self.cgroup_root);
    }
}

/// Creates a cgroup, in each hierarchy.
///
/// # Errors
/// Fails if the directory cannot be created.
pub fn make_cgroup(root: &str) -> anyhow::Result<()> {
    let made = groups(root).into_iter().try_for_each(std::fs::create_dir_all);
    made.with_context(|| format!("cgroup {root}"))
}

/// Removes a cgroup and its descendants. One with processes stays.
pub fn remove_cgroup(root: &str) {
    for dir in groups(root) {
        remove_group(&dir);
    }
}

/// Returns the version that a kubelet reports.
///
/// # Errors
/// Fails if the program cannot be run.
pub fn version(binary: &Path) -> anyhow::Result<String> {
    let output = Command::new(binary).arg("--version").output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the directories of a cgroup: one per controller, or one.
fn groups(root: &str) -> Vec<PathBuf> {
    let all = Path::new("/sys/fs/cgroup");
    let name = root.trim_start_matches('/');
    if all.join("cgroup.controllers").exists() {
        return vec![all.join(name)];
    }
    let entries = std::fs::read_dir(all).into_iter().flatten().flatten();
    // Other names of the same directories are links.
    let dirs = entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
    dirs.map(|e| e.path().join(name)).collect()
}

/// Removes a cgroup and its descendants. Only directories can be removed there.
fn remove_group(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove_group(&entry.path());
        }
    }
    let _not_there = std::fs::remove_dir(dir);
}
