//! Identity of the runtime, and the calls that end some versions of it.
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_cri_api::v1;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use tonic::Status;

use crate::policy::{Policy, RUNTIME};
use crate::upstream::Upstream;

/// Time limit for the runtime's Version call.
const VERSION_TIMEOUT: Duration = Duration::from_secs(2);

/// Methods with statistics of sandboxes.
const SANDBOX_STATS: [&str; 3] = ["PodSandboxStats", "ListPodSandboxStats", "StreamPodSandboxStats"];

/// The runtime's identity and the state of the connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RuntimeInfo {
    /// Whether the runtime answers; if not, `error` has the reason.
    pub connected: bool,
    /// `runtime_name` of the CRI's Version, such as `containerd`; empty before the first connection.
    pub name: String,
    /// `runtime_version` of the CRI's Version.
    pub version: String,
    /// Version of the CRI.
    pub api_version: String,
    /// Reason why the runtime is not connected; empty otherwise.
    pub error: String,
}

impl RuntimeInfo {
    /// Requests the identity of the runtime.
    ///
    /// # Errors
    /// Fails if the runtime is not connected, or does not answer within 2 s. The message has the reason.
    pub(crate) async fn of(upstream: &Upstream) -> Result<Self, String> {
        let mut client = RuntimeServiceClient::new(upstream.clone());
        let version_call = client.version(v1::VersionRequest::default());
        match tokio::time::timeout(VERSION_TIMEOUT, version_call).await {
            Ok(Ok(answer)) => {
                let answer = answer.into_inner();
                Ok(Self {
                    connected: true,
                    name: answer.runtime_name,
                    version: answer.runtime_version,
                    api_version: answer.runtime_api_version,
                    error: String::new(),
                })
            }
            Ok(Err(status)) => Err(message_of(&status)),
            Err(_) => Err(format!(
                "the runtime at {} does not say its version within {} s",
                upstream.path().display(),
                VERSION_TIMEOUT.as_secs()
            )),
        }
    }

    /// Returns whether the runtime may end during a call of this method.
    ///
    /// containerd 1.6 up to 1.6.21 stores the CPU time of a sandbox in a map that others read or write at the
    /// same time, and then ends with "concurrent map writes"
    /// (<https://github.com/containerd/containerd/pull/8130>). Containers survive that; calls in flight fail.
    #[must_use]
    pub(crate) fn may_end_during(&self, method: &str) -> bool {
        SANDBOX_STATS.contains(&method)
            && self.name == "containerd"
            && matches!(numbers(&self.version)[..], [1, 6] | [1, 6, 0..=21, ..])
    }
}

/// Returns the numbers of a version: `v1.6.20~ds1` has 1, 6 and 20.
#[must_use]
pub(crate) fn numbers(version: &str) -> Vec<u32> {
    let text = version.trim_start_matches('v');
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    text[..end].split('.').map_while(|number| number.parse().ok()).collect()
}

/// The runtime of the current connection. A runtime of another version has another connection.
#[derive(Debug, Default)]
pub(crate) struct ConnectedRuntime(Mutex<Option<(u64, Arc<RuntimeInfo>)>>);

impl ConnectedRuntime {
    /// Returns why a call must not be sent, or none if it may be.
    ///
    /// # Errors
    /// Fails as [`RuntimeInfo::of`]. The call must not be sent then either.
    pub(crate) async fn refusal(&self, upstream: &Upstream, row: &Policy) -> Result<Option<String>, String> {
        if row.service != RUNTIME || !SANDBOX_STATS.contains(&row.method) {
            return Ok(None);
        }
        let info = self.info(upstream).await?;
        Ok(info.may_end_during(row.method).then(|| {
            format!(
                "{} {} may end during {}: https://github.com/containerd/containerd/pull/8130",
                info.name, info.version, row.method
            )
        }))
    }

    async fn info(&self, upstream: &Upstream) -> Result<Arc<RuntimeInfo>, String> {
        let connection = upstream.connection_number().await.map_err(|e| e.to_string())?;
        if let Some((owner, info)) = &*self.0.lock()
            && *owner == connection
        {
            return Ok(info.clone());
        }
        let info = Arc::new(RuntimeInfo::of(upstream).await?);
        *self.0.lock() = Some((connection, info.clone()));
        Ok(info)
    }
}

/// Returns the innermost cause, since tonic's own text is only "transport error".
pub(crate) fn message_of(status: &Status) -> String {
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(status);
    let mut text = status.message().to_owned();
    while let Some(error) = cause {
        text = error.to_string();
        cause = error.source();
    }
    if text.is_empty() { format!("{:?}", status.code()) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_sandboxes_are_fatal_to_containerd_1_6_before_1_6_22() {
        for (name, version, fatal) in [
            ("containerd", "1.6.20~ds1", true),
            ("containerd", "v1.6.0", true),
            ("containerd", "1.6.21", true),
            ("containerd", "1.6.8-rc.1+build", true),
            ("containerd", "1.6", true),
            ("containerd", "v1.6.22", false),
            ("containerd", "1.6.39", false),
            // Older versions have no such statistics.
            ("containerd", "1.5.18", false),
            ("containerd", "1.7.0", false),
            ("containerd", "v2.1.9", false),
            ("containerd", "", false),
            ("containerd", "unknown", false),
            ("cri-o", "1.6.20", false),
        ] {
            let info = RuntimeInfo { name: name.into(), version: version.into(), ..RuntimeInfo::default() };
            for method in SANDBOX_STATS {
                assert_eq!(info.may_end_during(method), fatal, "{name} {version} {method}");
            }
            for method in ["ListContainerStats", "ContainerStats", "ListPodSandbox"] {
                assert!(!info.may_end_during(method), "{method}");
            }
        }
    }
}
