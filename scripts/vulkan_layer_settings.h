// llama.cpp's Vulkan backend uses the extension VK_EXT_layer_settings, which Vulkan's headers have since version
// 1.3.272. Debian 12 and others have older ones. These declarations have the same layout. The extension only
// passes settings to Vulkan's validation layer, so that it has no effect on machines without that layer.
#pragma once
#include <vulkan/vulkan_core.h>

#ifndef VK_EXT_layer_settings
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT { eBool32 = 0 };

struct LayerSettingEXT {
    const char * layer_name;
    const char * setting_name;
    LayerSettingTypeEXT type;
    uint32_t value_count;
    const void * values;
};

struct LayerSettingsCreateInfoEXT {
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & list)
        : setting_count(static_cast<uint32_t>(list.size())), settings(list.data()) {}

    VkStructureType type = static_cast<VkStructureType>(1000496000);
    const void * next = nullptr;
    uint32_t setting_count;
    const LayerSettingEXT * settings;
};

}  // namespace vk
#endif
