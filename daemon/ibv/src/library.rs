//! libibverbs and librdmacm, found when they are wanted.
//!
//! The program must start where the libraries are not installed, so nothing here may refer to one of
//! their functions by name: they are looked up, in the versions that the headers are about.

use rdma_sys::*;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::sync::OnceLock;
use underpass_rdma::verbs::Error;

fn open(file: &CStr) -> Option<*mut c_void> {
    // SAFETY: a C string; what the library's constructors do is the system's own business.
    let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    (!handle.is_null()).then_some(handle)
}

/// Looks up a function that must be there.
fn find(handle: *mut c_void, name: &'static CStr, version: &CStr) -> Result<*mut c_void, Error> {
    // SAFETY: `handle` comes from a successful dlopen and is never closed; both names are C strings.
    let p = unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) };
    if p.is_null() {
        return Err(Error::NoSymbol(name.to_str().unwrap_or("a function")));
    }
    Ok(p)
}

/// `_ibv_query_gid_table`, behind the header's inline function; the bindings leave it out: context,
/// room, number of entries there, flags (0), size of an entry; answers how many, or an error negated.
type QueryGidTable =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;

macro_rules! library {
    (
        $(#[$doc:meta])*
        $library:ident, $file:literal, absent: $absent:expr;
        $( $name:ident @ $version:literal : fn($($arg:ty),*) $(-> $ret:ty)?; )*
        $( [unbound] $field:ident = $symbol:literal @ $since:literal : $kind:ty; )*
    ) => {
        $(#[$doc])*
        pub struct $library {
            $( pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?, )*
            $( pub $field: $kind, )*
        }

        impl $library {
            /// The library, if it is there. A failure is not remembered: it may be installed later.
            pub fn get() -> Result<&'static $library, Error> {
                static LOADED: OnceLock<$library> = OnceLock::new();
                if let Some(l) = LOADED.get() {
                    return Ok(l);
                }
                let library = $library::load($file)?;
                // Two threads may both have loaded it: the same functions, either will do.
                Ok(LOADED.get_or_init(|| library))
            }

            fn load(file: &CStr) -> Result<$library, Error> {
                $library::resolve(open(file).ok_or($absent)?)
            }

            fn resolve(handle: *mut c_void) -> Result<$library, Error> {
                Ok($library {
                    $( $name: {
                        let name = concat!(stringify!($name), "\0");
                        let name = CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or(c"?");
                        let p = find(handle, name, $version)?;
                        // SAFETY: the library's function of this name and version has this
                        // signature; a test compares it with the generated bindings.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) $(-> $ret)?,
                            >(p)
                        }
                    }, )*
                    $( $field: {
                        let p = find(handle, $symbol, $since)?;
                        // SAFETY: the function's signature in the library's headers.
                        unsafe { std::mem::transmute::<*mut c_void, $kind>(p) }
                    }, )*
                })
            }

            /// Fails to compile when a signature differs from the bindings. It is never called: the
            /// program would need the library to start.
            #[cfg(test)]
            #[allow(dead_code)]
            fn signatures() {
                $( let _: unsafe extern "C" fn($($arg),*) $(-> $ret)? = rdma_sys::$name; )*
            }
        }
    };
}

library! {
    /// The functions of libibverbs that we use. Loaded once and never closed.
    Library, c"libibverbs.so.1", absent: Error::NoLibrary;
    ibv_get_device_list @ c"IBVERBS_1.1": fn(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list @ c"IBVERBS_1.1": fn(*mut *mut ibv_device);
    ibv_get_device_name @ c"IBVERBS_1.1": fn(*mut ibv_device) -> *const c_char;
    ibv_open_device @ c"IBVERBS_1.1": fn(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device @ c"IBVERBS_1.1": fn(*mut ibv_context) -> c_int;
    ibv_get_async_event @ c"IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ibv_ack_async_event @ c"IBVERBS_1.1": fn(*mut ibv_async_event);
    ibv_query_device @ c"IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    ibv_query_port @ c"IBVERBS_1.1": fn(*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int;
    ibv_alloc_pd @ c"IBVERBS_1.1": fn(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd @ c"IBVERBS_1.1": fn(*mut ibv_pd) -> c_int;
    ibv_reg_mr @ c"IBVERBS_1.1": fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr @ c"IBVERBS_1.1": fn(*mut ibv_mr) -> c_int;
    ibv_create_comp_channel @ c"IBVERBS_1.0": fn(*mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel @ c"IBVERBS_1.0": fn(*mut ibv_comp_channel) -> c_int;
    ibv_create_cq @ c"IBVERBS_1.1":
        fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    ibv_destroy_cq @ c"IBVERBS_1.1": fn(*mut ibv_cq) -> c_int;
    ibv_get_cq_event @ c"IBVERBS_1.1":
        fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events @ c"IBVERBS_1.1": fn(*mut ibv_cq, c_uint);
    ibv_create_qp @ c"IBVERBS_1.1": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp @ c"IBVERBS_1.1": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_query_qp @ c"IBVERBS_1.1":
        fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    ibv_destroy_qp @ c"IBVERBS_1.1": fn(*mut ibv_qp) -> c_int;
    [unbound] query_gid_table = c"_ibv_query_gid_table" @ c"IBVERBS_1.11": QueryGidTable;
}

library! {
    /// The functions of librdmacm that we use. Loaded with the first iWARP queue pair, never closed.
    Cm, c"librdmacm.so.1", absent: Error::NoCmLibrary;
    rdma_create_event_channel @ c"RDMACM_1.0": fn() -> *mut rdma_event_channel;
    rdma_destroy_event_channel @ c"RDMACM_1.0": fn(*mut rdma_event_channel);
    rdma_create_id @ c"RDMACM_1.0":
        fn(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, rdma_port_space::Type) -> c_int;
    rdma_destroy_id @ c"RDMACM_1.0": fn(*mut rdma_cm_id) -> c_int;
    rdma_bind_addr @ c"RDMACM_1.0": fn(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
    rdma_listen @ c"RDMACM_1.0": fn(*mut rdma_cm_id, c_int) -> c_int;
    rdma_get_src_port @ c"RDMACM_1.0": fn(*mut rdma_cm_id) -> u16;
    rdma_resolve_addr @ c"RDMACM_1.0":
        fn(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
    rdma_resolve_route @ c"RDMACM_1.0": fn(*mut rdma_cm_id, c_int) -> c_int;
    rdma_connect @ c"RDMACM_1.0": fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    rdma_accept @ c"RDMACM_1.0": fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    rdma_reject @ c"RDMACM_1.0": fn(*mut rdma_cm_id, *const c_void, u8) -> c_int;
    rdma_get_cm_event @ c"RDMACM_1.0":
        fn(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
    rdma_ack_cm_event @ c"RDMACM_1.0": fn(*mut rdma_cm_event) -> c_int;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_library_is_an_error() {
        assert_eq!(
            Library::load(c"libibverbs-not-there.so.1").err(),
            Some(Error::NoLibrary)
        );
        assert_eq!(
            Cm::load(c"librdmacm-not-there.so.1").err(),
            Some(Error::NoCmLibrary)
        );
    }

    #[test]
    fn a_library_without_the_functions_is_an_error() {
        assert_eq!(
            Library::load(c"libc.so.6").err(),
            Some(Error::NoSymbol("ibv_get_device_list"))
        );
        assert_eq!(
            Cm::load(c"libc.so.6").err(),
            Some(Error::NoSymbol("rdma_create_event_channel"))
        );
    }

    #[test]
    fn all_functions_are_there() {
        Library::get().map(|_| ()).unwrap();
        Cm::get().map(|_| ()).unwrap();
    }

    /// Sizes that the C compiler gives; the bindings have several of these written by hand.
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn layouts() {
        use std::mem::{offset_of, size_of};
        assert_eq!(size_of::<ibv_send_wr>(), 128);
        assert_eq!(size_of::<ibv_recv_wr>(), 32);
        assert_eq!(size_of::<ibv_sge>(), 16);
        assert_eq!(size_of::<ibv_wc>(), 48);
        assert_eq!(size_of::<ibv_qp_attr>(), 144);
        assert_eq!(size_of::<ibv_qp_init_attr>(), 64);
        assert_eq!(size_of::<ibv_async_event>(), 16);
        assert_eq!(size_of::<ibv_port_attr>(), 52);
        assert_eq!(size_of::<ibv_device_attr>(), 232);
        assert_eq!(size_of::<ibv_gid_entry>(), 32);
        assert_eq!(size_of::<ibv_context>(), 328);
        assert_eq!(offset_of!(ibv_context, async_fd), 268);
        assert_eq!(offset_of!(ibv_context_ops, post_send), 200);
        assert_eq!(offset_of!(ibv_qp, qp_num), 52);
        assert_eq!(size_of::<rdma_cm_id>(), 416);
        assert_eq!(offset_of!(rdma_cm_id, route), 32);
        assert_eq!(offset_of!(rdma_cm_id, ps), 344);
        assert_eq!(size_of::<rdma_addr>(), 296);
        assert_eq!(offset_of!(rdma_addr, dst_addr_union), 128);
        assert_eq!(offset_of!(rdma_addr, addr), 256);
        assert_eq!(size_of::<rdma_conn_param>(), 24);
        assert_eq!(offset_of!(rdma_conn_param, private_data_len), 8);
        assert_eq!(offset_of!(rdma_conn_param, qp_num), 16);
        assert_eq!(size_of::<rdma_cm_event>(), 80);
        assert_eq!(offset_of!(rdma_cm_event, event), 16);
        assert_eq!(offset_of!(rdma_cm_event, param), 24);
        assert_eq!(offset_of!(rdma_event_channel, fd), 0);
    }
}
