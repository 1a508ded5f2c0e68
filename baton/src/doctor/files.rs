//! Checks whether the files that the settings name can be read. [`super::identity`] checks those of the cluster's secret
//! and certificates, [`super::model`] those of the model.

use std::fs::File;
use std::path::{Path, PathBuf};

use router::RouterConfig;
use router::tenants::oidc::KeySource;

use crate::config_file::ConfigFile;

use super::finding::Finding;

const GROUP: &str = "files";

pub(super) fn look(process: &ConfigFile) -> Vec<Finding> {
    let admin_key = Some(&process.cluster().admin_key_file).filter(|file| !file.is_empty());
    let mut files = vec![("cluster.admin_key_file", admin_key.map(PathBuf::from))];
    if let ConfigFile::Router(config) = process {
        files.extend(of_router(config));
    }
    files.into_iter().filter_map(|(setting, file)| Some(readable(setting, &file?))).collect()
}

fn of_router(config: &RouterConfig) -> [(&'static str, Option<PathBuf>); 5] {
    let certificate = config.certificate.as_ref();
    let keys = config.oidc.as_ref().and_then(|oidc| match &oidc.keys {
        KeySource::File(file) => Some(file.clone()),
        KeySource::Url(_) => None,
    });
    [
        ("router.tenants_file", config.tenants_file.clone()),
        ("router.tls_cert_file", certificate.map(|files| files.certificate.clone())),
        ("router.tls_key_file", certificate.map(|files| files.key.clone())),
        ("expert.oidc.keys_file", keys),
        (
            "expert.upstream.api_key_file",
            config.upstream.as_ref().and_then(|pools| pools.api_key_file.clone()),
        ),
    ]
}

fn readable(setting: &'static str, file: &Path) -> Finding {
    let shown = file.display();
    match File::open(file) {
        Ok(_) => Finding::ok(GROUP, format!("{setting} {shown}: can be read")),
        Err(error) => Finding::bad(
            GROUP,
            format!("{setting} {shown}: {error}"),
            "put the file there, or mount it, and let the process read it",
        ),
    }
}
