//! libibverbs, found when it is wanted.
//!
//! The program must start where the library is not installed, so nothing here may refer to one of its
//! functions by name: they are looked up, in the versions that the headers are about.

use crate::verbs::Error;
use rdma_sys::*;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::sync::OnceLock;

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
    ($( $name:ident @ $version:literal : fn($($arg:ty),*) $(-> $ret:ty)?; )*) => {
        /// The functions we use. Loaded once and never closed.
        pub struct Library {
            $( pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?, )*
            pub query_gid_table: QueryGidTable,
        }

        impl Library {
            fn resolve(handle: *mut c_void) -> Result<Library, Error> {
                Ok(Library {
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
                    query_gid_table: {
                        let p = find(handle, c"_ibv_query_gid_table", c"IBVERBS_1.11")?;
                        // SAFETY: the function's signature in `infiniband/verbs.h`.
                        unsafe { std::mem::transmute::<*mut c_void, QueryGidTable>(p) }
                    },
                })
            }
        }

        /// Fails to compile when a signature differs from the bindings. It is never called: the
        /// program would need the library to start.
        #[cfg(test)]
        #[allow(dead_code)]
        fn signatures() {
            $( let _: unsafe extern "C" fn($($arg),*) $(-> $ret)? = rdma_sys::$name; )*
        }
    };
}

library! {
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
}

impl Library {
    /// The library, if it is there. A failure is not remembered: it may be installed later.
    pub fn get() -> Result<&'static Library, Error> {
        static LOADED: OnceLock<Library> = OnceLock::new();
        if let Some(l) = LOADED.get() {
            return Ok(l);
        }
        let library = Library::load(c"libibverbs.so.1")?;
        // Two threads may both have loaded it: the same functions, either will do.
        Ok(LOADED.get_or_init(|| library))
    }

    fn load(file: &CStr) -> Result<Library, Error> {
        // SAFETY: a C string; what the library's constructors do is the system's own business.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(Error::NoLibrary);
        }
        Library::resolve(handle)
    }
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
    }

    #[test]
    fn a_library_without_the_functions_is_an_error() {
        assert_eq!(
            Library::load(c"libc.so.6").err(),
            Some(Error::NoSymbol("ibv_get_device_list"))
        );
    }

    #[test]
    fn all_functions_are_there() {
        Library::get().map(|_| ()).unwrap();
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
    }
}
