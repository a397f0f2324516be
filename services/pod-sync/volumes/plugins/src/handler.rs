//! Handlers, which register the plugins of one plugin type.

use std::path::PathBuf;

use async_trait::async_trait;

/// A plugin, as described in its reply to GetInfo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugin {
    /// Plugin type: `CSIPlugin`, `DevicePlugin` or `DRAPlugin`.
    pub kind: String,
    /// Name, unique per type.
    pub name: String,
    /// Socket of the plugin's own services.
    pub endpoint: PathBuf,
    /// Supported versions of the API, in the plugin's order.
    pub versions: Vec<String>,
    /// Socket of the registration.
    pub socket: PathBuf,
}

/// Reason why a handler refuses a plugin. The text is sent to the plugin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HandlerError(pub String);

/// Registers the plugins of one type. The methods are called for different sockets at the same time, for one
/// socket one after the other.
#[async_trait]
pub trait PluginHandler: Send + Sync {
    /// Checks name, endpoint and versions, without a call of the plugin.
    ///
    /// # Errors
    /// Returns the reason for which the plugin is refused.
    fn validate(&self, plugin: &Plugin) -> Result<(), HandlerError>;

    /// Makes the plugin available. Called only after a successful [`PluginHandler::validate`].
    ///
    /// # Errors
    /// Returns why the plugin cannot be used; the handler keeps nothing of it.
    async fn register(&self, plugin: &Plugin) -> Result<(), HandlerError>;

    /// Makes the plugin unavailable: its socket was removed or replaced, or it could not be informed of its
    /// registration.
    async fn deregister(&self, plugin: &Plugin);
}
