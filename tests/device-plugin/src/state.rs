//! The script of the plugin, and a record of its calls.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use quintlet_plugin_api::device_plugin as api;
use tokio::sync::watch;
use tonic::Code;

/// A method of the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
    /// Read once after each registration.
    GetDevicePluginOptions,
    /// A stream of the devices and their health.
    ListAndWatch,
    /// The plugin's choice among free devices.
    GetPreferredAllocation,
    /// Environment, mounts and device nodes of a container.
    Allocate,
    /// Reset of the devices before a container starts.
    PreStartContainer,
}

/// A fault of a method, until another one is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The call never returns.
    Hang,
    /// The call fails with this code.
    Fail(Code),
    /// The call returns an answer without containers.
    Empty,
}

/// The script of the plugin, and a record of its calls.
#[derive(Debug, Default)]
pub(crate) struct PluginState {
    pub(crate) options: Mutex<api::DevicePluginOptions>,
    pub(crate) devices: watch::Sender<Vec<api::Device>>,
    pub(crate) faults: Mutex<BTreeMap<Method, Fault>>,
    pub(crate) preferred: Mutex<Vec<String>>,
    pub(crate) calls: Mutex<Vec<String>>,
    pub(crate) name: Mutex<String>,
    pub(crate) endpoint: Mutex<String>,
    pub(crate) informed: Mutex<Vec<Result<(), String>>>,
    pub(crate) list_ends: watch::Sender<u64>,
    /// Allocate returns no CDI devices.
    pub(crate) without_cdi: Mutex<bool>,
}
