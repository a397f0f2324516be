//! Calls of one device plugin.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pod_sync_plugins::call::{CallError, Deadline, call, channel};
use quintlet_kit::task::blocking;
use quintlet_kit::{clock, failpoint, socket};
use quintlet_plugin_api::device_plugin as api;
use quintlet_plugin_api::device_plugin::device_plugin_client::DevicePluginClient;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::Channel;

use crate::device::{DeviceId, DeviceIds};
use crate::inventory::{PluginOptions, RegistrationNumber};
use crate::names::PluginRefusal;
use crate::select::PreferenceQuery;

/// Longest wait until a process listens at the socket of a plugin, and for its options.
const DIAL_LIMIT: Duration = Duration::from_secs(10);
/// Time limit of GetPreferredAllocation. The kubelet has none.
const PREFERENCE_LIMIT: Duration = Duration::from_secs(10);
/// Time limit of Allocate, with the wait for earlier calls of the plugin. Plugins that program a device are
/// slow; the kubelet has no limit.
const ALLOCATE_LIMIT: Duration = Duration::from_secs(120);
/// Time limit of PreStartContainer (`KubeletPreStartContainerRPCTimeoutInSecs`).
const PRE_START_LIMIT: Duration = Duration::from_secs(30);

/// A plugin with the number of its registration, which its calls and lists carry.
#[derive(Debug)]
pub(crate) struct DevicePlugin {
    /// Number of the registration.
    pub(crate) number: RegistrationNumber,
    /// Socket of the plugin.
    pub(crate) socket: PathBuf,
    client: DevicePluginClient<Channel>,
    /// Held during a call that changes something: plugins may rely on one call at a time.
    calls: tokio::sync::Mutex<()>,
    /// Cancelled at the end of the registration.
    pub(crate) ended: CancellationToken,
}

/// A plugin that listens, before it has a number.
#[derive(Debug)]
pub(crate) struct ConnectedPlugin {
    socket: PathBuf,
    client: DevicePluginClient<Channel>,
    pub(crate) options: PluginOptions,
}

impl ConnectedPlugin {
    /// Connects to a plugin and reads its options.
    ///
    /// # Errors
    /// The socket is a link or no socket, nothing listens within the time limit, or the call fails.
    pub(crate) async fn connect(socket: PathBuf) -> Result<Self, PluginRefusal> {
        let path = socket.clone();
        blocking(move || check_socket(&path)).await?;
        reach(&socket).await?;
        let client = DevicePluginClient::new(channel(socket.clone()));
        let mut caller = client.clone();
        let answer = call(Deadline::after(DIAL_LIMIT), api::Empty {}, |request| {
            caller.get_device_plugin_options(request)
        });
        let answer = answer.await.map_err(PluginRefusal::Options)?;
        let options = PluginOptions {
            pre_start: answer.pre_start_required,
            preferences: answer.get_preferred_allocation_available,
        };
        Ok(Self { socket, client, options })
    }

    /// Returns the plugin of a registration, which ends with `stop`.
    pub(crate) fn registered(self, number: RegistrationNumber, stop: &CancellationToken) -> DevicePlugin {
        let Self { socket, client, .. } = self;
        DevicePlugin { number, socket, client, calls: tokio::sync::Mutex::new(()), ended: stop.child_token() }
    }
}

/// Refuses a link, whose owner could change its target, and anything that is not a socket. Blocks.
fn check_socket(path: &Path) -> Result<(), PluginRefusal> {
    let refused = |reason: String| PluginRefusal::Dial(format!("{} {reason}", path.display()));
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_symlink() => Err(refused("is a symbolic link".to_owned())),
        Ok(meta) if !meta.file_type().is_socket() => Err(refused("is not a socket".to_owned())),
        // A plugin may register before it listens.
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(refused(error.to_string())),
    }
}

/// Waits until a process listens at the socket.
async fn reach(path: &Path) -> Result<(), PluginRefusal> {
    let deadline = clock::deadline_after(Instant::now(), DIAL_LIMIT);
    loop {
        match socket::connect(path).await {
            Ok(_) => return Ok(()),
            Err(error) if is_temporary(&error) && Instant::now() < deadline => {
                tokio::time::sleep(socket::CONNECT_INTERVAL).await;
            }
            Err(error) => return Err(PluginRefusal::Dial(error.to_string())),
        }
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

/// The end of a call that changes something.
#[derive(Debug)]
pub(crate) enum CallEnd<T> {
    Answered(T),
    Failed(CallError),
    /// The registration ended: the plugin was stopped or replaced.
    PluginEnded,
    /// The pod no longer needs the answer.
    Cancelled,
}

impl DevicePlugin {
    /// Opens the stream of lists.
    pub(crate) async fn lists(&self) -> Result<tonic::Streaming<api::ListAndWatchResponse>, CallError> {
        let answer = self.client.clone().list_and_watch(api::Empty {}).await;
        answer.map(tonic::Response::into_inner).map_err(CallError::from)
    }

    /// Returns the devices that the plugin prefers.
    pub(crate) async fn prefer(
        &self,
        query: PreferenceQuery,
        cancel: &CancellationToken,
    ) -> CallEnd<DeviceIds> {
        let container = api::ContainerPreferredAllocationRequest {
            available_device_i_ds: strings(&query.available),
            must_include_device_i_ds: strings(&query.must_include),
            allocation_size: i32::try_from(query.size).unwrap_or(i32::MAX),
        };
        let request = api::PreferredAllocationRequest { container_requests: vec![container] };
        let mut client = self.client.clone();
        let answer = self.one_call(PREFERENCE_LIMIT, cancel, move |deadline| async move {
            failpoint::reached!(File, Before, "preferred devices read");
            let answer = call(deadline, request, |request| client.get_preferred_allocation(request)).await;
            failpoint::reached!(File, After, "preferred devices read");
            answer
        });
        match answer.await {
            CallEnd::Answered(answer) => {
                let ids = answer.container_responses.into_iter().next().unwrap_or_default().device_i_ds;
                CallEnd::Answered(ids.into_iter().map(DeviceId::from).collect())
            }
            CallEnd::Failed(error) => CallEnd::Failed(error),
            CallEnd::PluginEnded => CallEnd::PluginEnded,
            CallEnd::Cancelled => CallEnd::Cancelled,
        }
    }

    /// Calls Allocate for one container. Returns its response, if the plugin's answer has one.
    pub(crate) async fn allocate(
        &self,
        ids: &DeviceIds,
        cancel: &CancellationToken,
    ) -> CallEnd<Option<api::ContainerAllocateResponse>> {
        let container = api::ContainerAllocateRequest { devices_ids: strings(ids) };
        let request = api::AllocateRequest { container_requests: vec![container] };
        let mut client = self.client.clone();
        let answer = self.one_call(ALLOCATE_LIMIT, cancel, move |deadline| async move {
            failpoint::reached!(File, Before, "devices allocated");
            let answer = call(deadline, request, |request| client.allocate(request)).await;
            failpoint::reached!(File, After, "devices allocated");
            answer.map(|answer| answer.container_responses.into_iter().next())
        });
        answer.await
    }

    /// Calls PreStartContainer for the devices of one container.
    pub(crate) async fn pre_start(&self, ids: &DeviceIds, cancel: &CancellationToken) -> CallEnd<()> {
        let request = api::PreStartContainerRequest { devices_ids: strings(ids) };
        let mut client = self.client.clone();
        let answer = self.one_call(PRE_START_LIMIT, cancel, move |deadline| async move {
            failpoint::reached!(File, Before, "devices prepared");
            let answer = call(deadline, request, |request| client.pre_start_container(request)).await;
            failpoint::reached!(File, After, "devices prepared");
            answer.map(drop)
        });
        answer.await
    }

    /// Runs one call beside no other one of this plugin. The time limit covers the wait for its turn.
    async fn one_call<T, F>(
        &self,
        limit: Duration,
        cancel: &CancellationToken,
        rpc: impl FnOnce(Deadline) -> F,
    ) -> CallEnd<T>
    where
        F: Future<Output = Result<T, CallError>>,
    {
        let deadline = Deadline::after(limit);
        let turn = async {
            // The turn is over within the limits of the calls before it.
            let _turn = self.calls.lock().await;
            rpc(deadline).await
        };
        // A call that is dropped is cancelled at the plugin. A device that it has prepared stays so: the API
        // has no call for its end.
        let answer = tokio::select! {
            answer = tokio::time::timeout(limit, turn) => answer,
            () = cancel.cancelled() => return CallEnd::Cancelled,
            () = self.ended.cancelled() => return CallEnd::PluginEnded,
        };
        match answer {
            Ok(Ok(answer)) => CallEnd::Answered(answer),
            // The connection may break before the stream of lists ends.
            Ok(Err(error)) if error.code == Code::Unavailable => {
                match tokio::time::timeout(END_LIMIT, self.ended.cancelled()).await {
                    Ok(()) => CallEnd::PluginEnded,
                    Err(_) => CallEnd::Failed(error),
                }
            }
            Ok(Err(error)) => CallEnd::Failed(error),
            Err(_) => CallEnd::Failed(CallError {
                code: Code::DeadlineExceeded,
                message: "context deadline exceeded".to_owned(),
            }),
        }
    }
}

/// Longest time between a call that fails since its plugin has ended, and the end of the stream of lists.
const END_LIMIT: Duration = Duration::from_secs(1);

fn strings(ids: &DeviceIds) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}
