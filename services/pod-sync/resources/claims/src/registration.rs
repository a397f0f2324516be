//! Registration of the plugins of drivers, in the directory of all plugins.

use std::sync::Arc;

use async_trait::async_trait;
use pod_sync_plugins::{HandlerError, Plugin, PluginHandler};
use quintlet_kit::task::blocking;

use crate::driver::check_endpoint;
use crate::error::ClaimError;
use crate::manager::Claims;
use crate::plugins::{PluginServices, select_services};

/// Plugin type in the directory of all plugins.
pub const PLUGIN_TYPE: &str = "DRAPlugin";

impl Claims {
    /// Returns the handler of the plugins of drivers.
    #[must_use]
    pub fn handler(&self) -> Arc<dyn PluginHandler> {
        Arc::new(DriverPluginHandler(self.clone()))
    }
}

#[derive(Debug)]
struct DriverPluginHandler(Claims);

fn services(plugin: &Plugin) -> Result<PluginServices, HandlerError> {
    select_services(&plugin.versions).map_err(|reason| {
        let Plugin { name, endpoint, .. } = plugin;
        let endpoint = endpoint.display();
        let text = format!(
            "invalid supported gRPC versions of DRA driver plugin {name} at endpoint {endpoint}: {reason}"
        );
        HandlerError(text)
    })
}

#[async_trait]
impl PluginHandler for DriverPluginHandler {
    fn validate(&self, plugin: &Plugin) -> Result<(), HandlerError> {
        if plugin.name.is_empty() {
            return Err(HandlerError(ClaimError::NoDriverName.to_string()));
        }
        services(plugin).map(drop)
    }

    async fn register(&self, plugin: &Plugin) -> Result<(), HandlerError> {
        let services = services(plugin)?;
        let endpoint = plugin.endpoint.clone();
        blocking(move || check_endpoint(&endpoint)).await.map_err(|reason| {
            HandlerError(format!("endpoint of DRA driver plugin {}: {reason}", plugin.name))
        })?;
        self.0.add_plugin(&plugin.name, &plugin.endpoint, services).map_err(HandlerError)
    }

    async fn deregister(&self, plugin: &Plugin) {
        self.0.remove_plugin(&plugin.name, &plugin.endpoint);
    }
}
